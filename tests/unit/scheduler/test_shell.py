"""The shell around the machine: effects become messages, spans and metrics."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import cast

import pytest
from prometheus_client import generate_latest

from penstock.keys import Role
from penstock.queue.v1 import queue_pb2
from penstock.scheduler.v1 import scheduler_pb2
from penstock.scheduler.v1.scheduler_pb2 import CreditsResponse
from services.auth.caller import CALLER, Caller
from services.auth.keyring import NotAllowedError
from services.rpc.outbox import Outbox
from services.scheduler import runner, wire
from services.scheduler.core import messages as m
from services.scheduler.core.sharing import aside
from services.scheduler.core.waiting import MOST_UNSERVED_NAMES, OTHER_MODELS, PLACE_NS
from services.scheduler.servicer import Context, SchedulerServicer
from tests.support.scheduler_shell import Shell
from tests.support.scheduling import SECOND_NS, announced

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


async def sent(outbox: Outbox) -> list[scheduler_pb2.SchedulerToWorker]:
    """Close the outbox and return everything it still held."""
    outbox.close()
    return [message async for frame in outbox.frames() for message in CreditsResponse.FromString(frame).messages]


async def test_one_wake_up_grants_everything_that_is_ready_in_one_frame() -> None:
    shell = Shell()
    stream = shell.open()
    shell.runner.feed([announced(f"r{number}", "batch", 2, number) for number in range(4)])
    shell.runner.wake()
    stream.outbox.close()
    frames = [CreditsResponse.FromString(frame).messages async for frame in stream.outbox.frames()]
    assert [[message.WhichOneof("message") for message in frame] for frame in frames] == [["open", *["grant"] * 4]]


async def test_spans_carry_what_was_booked_settled_and_released() -> None:
    shell = Shell()
    stream = shell.open()
    shell.runner.feed([announced("r1", "batch", 6, traceparent=TRACEPARENT)])
    shell.runner.wake()
    shell.clock.time_ns = 3 * SECOND_NS
    epoch = stream.epoch
    shell.runner.feed([m.TokenizerAck(epoch, epoch, "r1", 1, 4)])
    shell.runner.feed([m.CompletionAck(epoch, epoch, "r1", 2, m.ReleaseCause.COMPLETED)])
    shell.runner.wake()
    wait, credit = shell.exporter.get_finished_spans()
    assert (wait.name, credit.name) == ("scheduler.grant", "scheduler.credits")
    for span in (wait, credit):
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.attributes is not None
        assert span.attributes["penstock.request.id"] == "r1"
        assert span.attributes["penstock.blocks.booked"] == 6
    assert credit.attributes is not None
    assert credit.attributes["penstock.blocks.settled"] == 4
    assert credit.attributes["penstock.blocks.released"] == 4
    assert credit.attributes["penstock.release.cause"] == "completed"
    assert credit.end_time == 3 * SECOND_NS
    assert wait.attributes is not None
    assert "penstock.grant.standing" not in wait.attributes
    (grant,) = [message.grant for message in await sent(stream.outbox) if message.HasField("grant")]
    assert wait.context is not None
    assert grant.traceparent == f"00-{TRACE_ID}-{wait.context.span_id:016x}-01"


async def test_a_scheduler_that_stops_tells_of_the_credits_that_it_leaves_behind() -> None:
    shell = Shell()
    epoch = shell.open().epoch
    shell.runner.feed([announced(f"r{number}", "batch", 2, number, traceparent=TRACEPARENT) for number in (1, 2)])
    shell.runner.wake()
    loop = asyncio.create_task(shell.runner.run())
    await asyncio.sleep(0)
    shell.runner.stop()
    shell.runner.feed([m.CompletionAck(epoch, epoch, "r1", 1, m.ReleaseCause.COMPLETED)])
    shell.runner.wake()
    shell.clock.time_ns = 3 * SECOND_NS
    assert [cause for cause in causes(shell) if cause] == ["completed"], "until then as ever"
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop
    assert [cause for cause in causes(shell) if cause] == ["completed", "scheduler_stopped"]
    left = shell.exporter.get_finished_spans()[-1]
    assert left.context is not None
    assert f"{left.context.trace_id:032x}" == TRACE_ID
    assert left.attributes is not None
    assert left.attributes["penstock.request.id"] == "r2"
    assert "penstock.blocks.released" not in left.attributes, "its worker holds them on"
    assert left.end_time == 3 * SECOND_NS


def causes(shell: Shell) -> list[object]:
    """Return what released the credits of each span so far."""
    return [(span.attributes or {}).get("penstock.release.cause") for span in shell.exporter.get_finished_spans()]


async def test_what_met_a_standing_grant_has_the_spans_and_counts_of_a_grant_that_nobody_waited_for() -> None:
    shell = Shell(standing_ns=SECOND_NS)
    stream = shell.open()
    epoch = stream.epoch
    shell.runner.feed([announced("r1", "batch", 1)])
    shell.runner.wake()
    shell.runner.feed([m.Gone("r1", m.GoneReason.CLAIMED)])
    shell.runner.feed([m.CompletionAck(epoch, epoch, "r1", 1, m.ReleaseCause.COMPLETED)])
    shell.runner.wake()
    shell.exporter.clear()
    request = queue_pb2.Announce(request_id="r2", channel="batch", attempt=1, traceparent=TRACEPARENT)
    used = scheduler_pb2.GrantUsed(epoch=epoch, grant=f"standing/{epoch}-1", announced=request)
    shell.runner.feed([wire.from_worker(scheduler_pb2.WorkerToScheduler(grant_used=used), epoch)])
    shell.runner.feed([m.CompletionAck(epoch, epoch, "r2", 2, m.ReleaseCause.COMPLETED)])
    shell.runner.wake()
    wait, credit = shell.exporter.get_finished_spans()
    for span in (wait, credit):
        assert span.context is not None
        assert span.attributes is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.attributes["penstock.request.id"] == "r2"
        assert span.attributes["penstock.blocks.booked"] == 2
    assert wait.start_time == wait.end_time
    assert wait.attributes is not None
    assert wait.attributes["penstock.grant.standing"] is True
    assert shell.registry.get_sample_value("penstock_scheduler_grant_wait_seconds_count", {"channel": "batch"}) == 2
    standing = [message.grant for message in await sent(stream.outbox) if message.grant.HasField("standing")]
    assert (standing[0].request_id, standing[0].standing.most_prompt_tokens) == (used.grant, 2)


def test_metrics_show_credits_refunds_and_waits() -> None:
    shell = Shell()
    stream = shell.open()
    epoch = stream.epoch
    shell.runner.feed([announced("r1", "batch", 6)])
    shell.runner.wake()
    shell.runner.feed([m.TokenizerAck(epoch, epoch, "r1", 1, 4), m.TokenizerAck(epoch, epoch, "r1", 1, 4)])
    shell.runner.feed([m.CompletionAck(epoch, 1, "r1", 2, m.ReleaseCause.COMPLETED)])
    shell.runner.feed([m.EngineReport(epoch, epoch, 5, preemptions=3, kv_cache_usage=0.5)])
    shell.runner.wake()
    shell.runner.look()
    text = generate_latest(shell.registry).decode()
    for line in (
        'free_blocks{worker="w1"} 6.0',
        'held_blocks{channel="batch",worker="w1"} 4.0',
        'drift_blocks{worker="w1"} 1.0',
        'refunded_blocks_total{cause="tokenizer_ack"} 2.0',
        'duplicate_acks_total{kind="tokenizer_ack"} 1.0',
        'stale_messages_total{kind="completion_ack"} 1.0',
        'grants_total{channel="batch"} 1.0',
        'grant_wait_seconds_count{channel="batch"} 1.0',
        'worker_preemptions_total{worker="w1"} 3.0',
        'kv_cache_usage_ratio{worker="w1"} 0.5',
        "audit_violations_total 0.0",
        'waiting_blocks{channel="batch",model=""} 0.0',
        'grantable_blocks{worker="w1"} 5.0',
    ):
        assert f"penstock_scheduler_{line}" in text


def test_epochs_grow_also_when_the_clock_stands_still() -> None:
    shell = Shell()
    assert shell.open("w1").epoch < shell.open("w2").epoch < shell.open("w1").epoch


def test_a_stopping_runner_grants_nothing_and_ends_its_streams() -> None:
    shell = Shell()
    stream = shell.open()
    shell.runner.stop()
    shell.runner.feed([announced("r1", "batch", 1)])
    shell.runner.wake()
    assert stream.outbox.closed
    assert shell.runner.snapshot().grants == {}


def test_models_that_nobody_serves_are_named(caplog: pytest.LogCaptureFixture) -> None:
    shell = Shell()
    shell.runner.feed([announced("r1", "batch", 1, 1, model="nope"), announced("r2", "batch", 1, 2)])
    shell.runner.wake()
    assert unserved_series(shell) == {"nope": 1, "": 1}
    shell.open()
    for _ in range(2):
        assert unserved_series(shell) == {"nope": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "1 requests wait for a worker",
        "1 requests wait for the model 'nope', which no connected worker serves",
    ]


def unserved_series(shell: Shell) -> dict[str, float]:
    """Return what the metrics say of models that nobody serves, as at the runner's next tick."""
    shell.runner.look()
    (family,) = (family for family in shell.runner._metrics.collect() if family.name.endswith("unserved_requests"))
    return {sample.labels["model"]: sample.value for sample in family.samples}


def wait_in_vain(shell: Shell, *models: str) -> list[str]:
    """Announce a request for each of `models`; return their ids."""
    requests = [announced(f"r-{model}", "batch", 1, number, model=model) for number, model in enumerate(models)]
    shell.runner.feed(requests)
    shell.runner.wake()
    return [request.request_id for request in requests]


def end(shell: Shell, request_ids: list[str]) -> None:
    """Say that the requests wait no longer."""
    shell.runner.feed([m.Gone(request_id, m.GoneReason.ENDED) for request_id in request_ids])
    shell.runner.wake()


def test_made_up_models_are_neither_series_nor_lines_without_end(caplog: pytest.LogCaptureFixture) -> None:
    shell = Shell()
    wait_in_vain(shell, "misspelt")
    seen: set[str] = set()
    for look in range(10):
        made_up = wait_in_vain(shell, *(f"made-up-{look}-{number}" for number in range(MOST_UNSERVED_NAMES // 2)))
        series = unserved_series(shell)
        assert series["misspelt"] == 1
        assert sum(series.values()) == 1 + len(made_up), "none is left out"
        seen.update(series)
        end(shell, made_up)
        shell.clock.time_ns += SECOND_NS
    assert len(seen) <= MOST_UNSERVED_NAMES + 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(seen), "each once"
    assert said[0] == "1 requests wait for the model 'misspelt', which no connected worker serves"
    assert said[-1] == "1 requests wait for other models, which no connected worker serves"


def test_a_model_that_nobody_has_waited_for_in_an_hour_leaves_its_place_to_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shell = Shell()
    wait_in_vain(shell, *(f"made-up-{number}" for number in range(MOST_UNSERVED_NAMES - 1)))
    early = wait_in_vain(shell, "early")
    assert OTHER_MODELS not in unserved_series(shell)
    end(shell, early)
    wait_in_vain(shell, "late")
    shell.clock.time_ns += PLACE_NS - 1
    assert unserved_series(shell)[OTHER_MODELS] == 1
    shell.clock.time_ns += 1
    caplog.clear()
    series = unserved_series(shell)
    assert (series["late"], OTHER_MODELS in series) == (1, False)
    assert [record.getMessage() for record in caplog.records] == [
        "1 requests wait for the model 'late', which no connected worker serves"
    ]


async def test_status_tells_of_the_models_that_metrics_tell_of() -> None:
    shell = Shell()
    wait_in_vain(shell, *(f"first-{number}" for number in range(MOST_UNSERVED_NAMES - 1)))
    shell.runner.look()
    for name in ("one", "two"):
        shell.runner.feed(
            announced(f"{name}-{later}", "batch", 1, later, model=f"later-{later}") for later in range(20)
        )
    shell.runner.wake()
    series = unserved_series(shell)
    told = await SchedulerServicer(shell.runner).Status(scheduler_pb2.StatusRequest(), cast("Context", None))
    assert {model.model: model.waiting for model in told.unserved_models} == series
    assert (len(series), series[OTHER_MODELS]) == (MOST_UNSERVED_NAMES + 1, 2 * 19)


def test_requests_for_any_model_are_told_of_whatever_names_are_made_up() -> None:
    shell = Shell()
    wait_in_vain(shell, *(f"made-up-{number}" for number in range(MOST_UNSERVED_NAMES)))
    assert OTHER_MODELS not in unserved_series(shell)
    wait_in_vain(shell, "")
    assert unserved_series(shell)[""] == 1


def test_status_shows_every_field() -> None:
    shell = Shell()
    shell.open()
    status = wire.status(shell.runner.snapshot(), {})
    assert (status.policy, status.workers[0].free_blocks, status.channels[0].ceiling_share) == (
        "virtual-channels", 10, 1.0,
    )  # fmt: skip


async def test_status_names_the_processes_whose_counts_it_tells() -> None:
    shell = Shell()
    shell.open()
    first, second = (SchedulerServicer(shell.runner) for _ in range(2))
    asked = scheduler_pb2.StatusRequest()
    status = await first.Status(asked, cast("Context", None))
    assert status.workers[0].instance_id == "i"
    assert status.workers[0].adapters == ["tuned"]
    assert status.instance_id
    assert status.instance_id == (await first.Status(asked, cast("Context", None))).instance_id
    assert status.instance_id != (await second.Status(asked, cast("Context", None))).instance_id
    assert 0 < status.up_ns < (await first.Status(asked, cast("Context", None))).up_ns


async def test_a_client_is_told_the_names_of_models_alone() -> None:
    shell = Shell()
    shell.open()
    servicer, context = SchedulerServicer(shell.runner), cast("Context", None)
    CALLER.set(Caller(Role.CLIENT, sees="acme"))
    with pytest.raises(NotAllowedError, match="operator or service"):
        await servicer.Status(scheduler_pb2.StatusRequest(), context)
    told = await servicer.Status(scheduler_pb2.StatusRequest(names_only=True), context)
    assert [(worker.model, list(worker.model_aliases)) for worker in told.workers] == [("m", ["tuned"])]
    told.workers[0].ClearField("model")
    told.workers[0].ClearField("model_aliases")
    assert told.up_ns > 0
    told.ClearField("up_ns")
    assert told == scheduler_pb2.StatusResponse(workers=[scheduler_pb2.WorkerStatus()]), "nothing else"


async def test_a_client_is_told_of_a_model_that_all_who_serve_it_are_drained() -> None:
    shell = Shell()
    for worker in "ab":
        shell.open(worker)
    servicer, asked = SchedulerServicer(shell.runner), scheduler_pb2.StatusRequest(names_only=True)

    async def told_after(*messages: m.Input) -> list[bool]:
        shell.runner.feed(messages)
        shell.runner.wake()
        return [worker.draining for worker in (await servicer.Status(asked, cast("Context", None))).workers]

    assert await told_after(m.DrainRequested("a")) == [False]
    assert await told_after(m.DrainRequested("b")) == [True]
    assert await told_after(m.DrainRequested("a", undo=True)) == [False]


def test_metrics_show_what_is_predicted_of_each_worker() -> None:
    shell = Shell("predictive")
    shell.open()
    shell.runner.feed([announced("r1", "batch", 2, max_tokens=4)])
    shell.runner.wake()
    shell.runner.look()
    text = generate_latest(shell.registry).decode()
    assert 'penstock_scheduler_predicted_peak_blocks{worker="w1"} 5.0' in text
    assert 'penstock_scheduler_margin_deviations{worker="w1"} -0.25' in text
    assert 'penstock_scheduler_preemption_cost_requests{worker="w1"} +Inf' in text
    assert 'penstock_scheduler_worker_recovering{worker="w1"} 0.0' in text
    assert 'penstock_scheduler_target_preemptions_total{worker="w1"} 0.0' in text


def test_a_grant_and_its_acks_carry_what_a_growing_reservation_needs() -> None:
    grant = m.Grant(7, "w1", "r1", "batch", 4, True, 1, "", 0, 2)
    assert scheduler_pb2.SchedulerToWorker.FromString(wire.grant(grant, "")).grant.reserve_output_tokens == 2
    ack = scheduler_pb2.TokenizerAck(
        epoch=7, request_id="r1", seq=3, held_blocks=4, prompt_tokens=50, generated_tokens=12, output_limit_tokens=90
    )
    settled = wire.from_worker(scheduler_pb2.WorkerToScheduler(tokenizer_ack=ack), 7)
    assert settled == m.TokenizerAck(7, 7, "r1", 3, 4, 50, 12, 90)
    cause = scheduler_pb2.RELEASE_CAUSE_COMPLETED
    release = scheduler_pb2.CompletionAck(epoch=7, request_id="r1", seq=4, cause=cause, output_tokens=17)
    released = wire.from_worker(scheduler_pb2.WorkerToScheduler(completion_ack=release), 7)
    assert released == m.CompletionAck(7, 7, "r1", 4, m.ReleaseCause.COMPLETED, 17)


async def test_a_defect_in_what_is_done_by_the_clock_ends_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("a defect")

    shell = Shell()
    shell.runner.feed([announced("r1", "batch", 1, 1, model="nope")])
    monkeypatch.setattr(logging.getLogger("scheduler"), "warning", fail)
    async with asyncio.timeout(30):
        with pytest.raises(ArithmeticError):
            await shell.runner.run()


@pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="the bound is compiled in")
async def test_a_pass_that_has_left_off_is_followed_by_another_without_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "MOST_LOOKS", 1)
    monkeypatch.setattr(runner, "TICK_S", 3_600)
    shell = Shell()
    stream = shell.open()
    large = m.WorkerOpened(1, "large", "i", ("m",), m.EngineShape(50, 1, 100, 5), (), False, False)
    shell.runner.feed([large, m.DrainRequested("large")])
    shell.runner.feed([announced(f"r{number}", "batch", 5 if number == 4 else 20, number) for number in range(5)])
    loop = asyncio.create_task(shell.runner.run())
    granted = []
    async with asyncio.timeout(30):
        async for frame in stream.outbox.frames():
            messages = CreditsResponse.FromString(frame).messages
            granted += [message.grant.request_id for message in messages if message.HasField("grant")]
            if granted:
                break
    loop.cancel()
    assert granted == ["r4"]
