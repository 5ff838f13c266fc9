"""What a run says of engines and ledger at its end: only what was done in it, whoever restarted meanwhile."""

from __future__ import annotations

from penstock.batch.summary import Growth, Tally, summarize, totals_of
from penstock.scheduler.v1.scheduler_pb2 import EngineReport, StatusResponse, WorkerStatus


def worker(
    name: str, process: str, usage_ns: float, busy_ns: int, preemptions: int = 0, epoch: int = 1
) -> WorkerStatus:
    engine = EngineReport(kv_cache_usage_ns=usage_ns, busy_ns=busy_ns, preemptions=preemptions)
    return WorkerStatus(worker_id=name, instance_id=process, epoch=epoch, engine=engine)


def grown(before: StatusResponse, after: StatusResponse, grants_at_least: int = 0) -> Growth:
    return totals_of(after).since(totals_of(before), grants_at_least)


def said(growth: Growth) -> str:
    return "\n".join(summarize(Tally(requests=1), 1.0, growth).lines())


def test_the_summary_counts_only_this_run() -> None:
    before = StatusResponse(workers=[worker("w", "a", 50, 100, 2)], tokenizer_refunds=5, instance_id="s")
    after = StatusResponse(workers=[worker("w", "a", 125, 200, 2)], tokenizer_refunds=9, instance_id="s")
    tally = Tally(requests=10, completion_tokens=100)
    summary = summarize(tally, 2.0, grown(before, after))
    assert (summary.requests_per_s, summary.completion_tokens_per_s) == (5, 50)
    assert summary.kv_usage == 0.75
    assert (summary.preemptions, summary.tokenizer_refunds) == (0, 4)
    text = "\n".join(summary.lines())
    assert "10 answered in 2.0 s" in text
    assert "restarted" not in text
    assert "gone" not in text


def test_a_worker_that_restarted_counts_from_its_start_though_it_has_outgrown_what_was() -> None:
    before = StatusResponse(workers=[worker("w", "a", 10, 100, 1)])
    growth = grown(before, StatusResponse(workers=[worker("w", "b", 80, 110, 3, epoch=2)]))
    assert growth.workers_restarted
    summary = summarize(Tally(requests=1), 1.0, growth)
    assert (summary.kv_usage, summary.preemptions) == (80 / 110, 3)
    assert summary.as_dict()["workers_restarted"] is True
    assert "a worker restarted" in said(growth)


def test_one_of_several_workers_that_restarted_is_noticed_and_the_others_count_in_full() -> None:
    before = StatusResponse(workers=[worker("w1", "a", 100, 1000, 5), worker("w2", "b", 10, 20, 1)])
    growth = grown(before, StatusResponse(workers=[worker("w1", "a", 600, 2000, 6), worker("w2", "c", 30, 40, 2)]))
    assert growth.workers_restarted
    assert growth.workers == (530, 1040, 3)


def test_a_scheduler_that_restarted_leaves_the_workers_counts_as_they_are() -> None:
    before = StatusResponse(workers=[worker("w", "a", 50, 100)], grants=3, tokenizer_refunds=2, instance_id="s")
    after = StatusResponse(workers=[worker("w", "a", 80, 200, epoch=2)], grants=9, tokenizer_refunds=7, instance_id="t")
    growth = grown(before, after)
    assert (growth.scheduler_restarted, growth.workers_restarted, growth.workers) == (True, False, (30, 100, 0))
    assert growth.ledger.tokenizer_refunds == 7
    cache, refunds = said(growth).splitlines()[-2:]
    assert refunds.endswith("since the scheduler restarted")
    assert "restarted" not in cache


def test_a_worker_that_has_not_reported_to_a_new_scheduler_counts_nothing() -> None:
    silent = WorkerStatus(worker_id="w", instance_id="a", epoch=2)
    growth = grown(StatusResponse(workers=[worker("w", "a", 50, 100)]), StatusResponse(workers=[silent]))
    assert (growth.workers, growth.workers_restarted) == ((0, 0, 0), False)
    assert "KV cache     0% used" in said(growth)


def test_a_worker_that_came_counts_and_one_that_went_is_told() -> None:
    before = StatusResponse(workers=[worker("w1", "a", 50, 100)])
    growth = grown(before, StatusResponse(workers=[worker("w2", "b", 20, 80)]))
    assert (growth.workers, growth.workers_restarted, growth.workers_gone) == ((20, 80, 0), False, True)
    assert "a worker is gone" in said(growth)


def test_no_more_than_the_whole_cache_is_ever_used() -> None:
    growth = grown(StatusResponse(), StatusResponse(workers=[worker("w", "a", 155, 100)]))
    assert summarize(Tally(requests=1), 1.0, growth).kv_usage == 1.0


def test_a_scheduler_that_names_no_processes_is_judged_by_streams_and_counts() -> None:
    before = StatusResponse(workers=[worker("w", "", 50, 100)], tokenizer_refunds=5, grants=9)
    # The refunds have outgrown what they were; the grants tell that they began at 0 again.
    after = StatusResponse(workers=[worker("w", "", 100, 200)], tokenizer_refunds=7, grants=8)
    growth = grown(before, after)
    assert (growth.scheduler_restarted, growth.workers_restarted, growth.ledger.tokenizer_refunds) == (True, False, 7)
    after = StatusResponse(workers=[worker("w", "", 60, 110, epoch=2)], tokenizer_refunds=6, grants=12)
    growth = grown(before, after)
    assert (growth.scheduler_restarted, growth.workers_restarted, growth.ledger.tokenizer_refunds) == (False, True, 1)
    assert growth.workers == (60, 110, 0)


def test_a_scheduler_that_granted_less_than_was_answered_has_restarted() -> None:
    after = StatusResponse(grants=4)
    assert grown(StatusResponse(), after, grants_at_least=5).scheduler_restarted
    assert not grown(StatusResponse(), after, grants_at_least=4).scheduler_restarted


def test_without_a_scheduler_the_summary_knows_nothing_of_the_fleet() -> None:
    summary = summarize(Tally(requests=1), 1.0, None)
    assert summary.kv_usage is None
    assert "the scheduler did not tell" in "\n".join(summary.lines())
