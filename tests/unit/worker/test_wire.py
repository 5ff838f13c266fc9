"""Every message of the two streams, to the session's values and back."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.queue.v1 import queue_pb2 as q
from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2 as s
from services.core.drain import Drain
from services.scheduler import wire as scheduler_wire
from services.scheduler.core import messages as scheduler_messages
from services.worker import wire
from services.worker.core import messages as m
from services.worker.engine import EngineShape

LEASE = m.Lease("r1", 2, 9)
REF = q.LeaseRef(request_id="r1", attempt=2, fencing_token=9)


def test_every_cause_has_its_number() -> None:
    assert set(wire.CAUSES) == set(m.Cause)
    named = {s.ReleaseCause.Name(number) for number in wire.CAUSES.values()}
    assert named == {f"RELEASE_CAUSE_{cause.name}" for cause in m.Cause}


def test_every_ending_but_a_failure_has_its_outcome() -> None:
    assert set(wire.OUTCOMES) == set(m.EndingKind) - {m.EndingKind.FAILED}
    for kind, number in wire.OUTCOMES.items():
        assert pb.Outcome.Name(number) == f"OUTCOME_{kind.name}"


@pytest.mark.parametrize(
    ("message", "heard"),
    [
        (q.QueueToWorker(open=q.WorkOpened(lease_ns=5, max_inflight=3)), m.QueueUp(5, 3)),
        (
            q.QueueToWorker(refused=q.Refused(request_id="r1", reason=q.REFUSED_REASON_LEASED)),
            m.Refused("r1", False),
        ),
        (
            q.QueueToWorker(refused=q.Refused(request_id="r1", reason=q.REFUSED_REASON_TOO_MANY)),
            m.Refused("r1", True),
        ),
        (
            q.QueueToWorker(cancel=q.CancelRun(lease=REF, reason=q.CANCEL_REASON_DEADLINE)),
            m.CancelRun(LEASE, m.CancelCause.DEADLINE),
        ),
        (q.QueueToWorker(recorded=q.Recorded(lease=REF, accepted=True)), m.Recorded(LEASE, True)),
        (q.QueueToWorker(watched=q.Watched(request_id="r1", watched=True)), m.Watched("r1", True)),
        (q.QueueToWorker(), None),
    ],
)
def test_what_the_queue_says_is_heard(message: q.QueueToWorker, heard: m.Message | None) -> None:
    assert wire.queue_message(message) == heard


@pytest.mark.parametrize("said", [wire.leaving("why \ud83d"), wire.give_back([LEASE], "why \ud83d")])
def test_a_reason_is_told_whatever_it_quotes(said: s.WorkerToScheduler | q.WorkerToQueue) -> None:
    told = said.leaving.reason if isinstance(said, s.WorkerToScheduler) else said.give_back.reason
    assert told == "why \\ud83d"


def test_a_delivery_names_what_sizes_the_request() -> None:
    sampling = pb.SamplingParams(n=3, max_tokens=50)
    deliver = q.Deliver(lease=REF, request=pb.Request(sampling=sampling), watched=True)
    assert wire.delivered(deliver) == m.Delivered(LEASE, 3, 50, True)
    assert wire.delivered(q.Deliver(lease=REF)) == m.Delivered(LEASE, 1, 0, False)


@pytest.mark.parametrize(
    ("default", "ceiling", "told"),
    [(None, None, (0, 0)), (20, 25, (20, 25)), (1 << 40, 1 << 40, (512, 512))],
)
def test_the_scheduler_hears_how_long_outputs_are_that_name_no_length(
    default: int | None, ceiling: int | None, told: tuple[int, int]
) -> None:
    shape = EngineShape("vllm", 64, 16, 512, 8, 0, "tiny", default_max_tokens=default, ceiling_max_tokens=ceiling)
    opened = wire.credits_open("w1", "i1", shape, 60, m.OpenCredits(())).open
    assert (opened.default_max_tokens, opened.ceiling_max_tokens) == told
    heard = scheduler_wire.worker_opened(s.WorkerToScheduler(open=opened), 1).shape
    assert (heard.default_max_tokens, heard.ceiling_max_tokens) == told


def test_unknown_free_blocks_stay_unset() -> None:
    unknown = wire.engine_report(m.SendReport(7, None, 1, 0, 0, 0, 0.5, 1.0, 2)).engine_report
    known = wire.engine_report(m.SendReport(7, 0, 1, 0, 0, 0, 0.5, 1.0, 2)).engine_report
    assert not unknown.HasField("blocks_free")
    assert known.HasField("blocks_free")


def test_prompts_of_each_kind_reach_the_renderer_with_their_options() -> None:
    sampling = pb.SamplingParams(max_tokens=9, truncate_prompt_tokens=-1, add_special_tokens=False)
    text = wire.prompt_spec(pb.Request(text="hello", sampling=sampling, echo=True))
    assert (text.text, text.max_tokens, text.truncate_prompt_tokens) == ("hello", 9, -1)
    assert text.add_special_tokens is False
    assert text.want_text
    plain = wire.prompt_spec(pb.Request(text=""))
    assert (plain.text, plain.add_special_tokens, plain.truncate_prompt_tokens) == ("", None, None)
    ids = wire.prompt_spec(pb.Request(token_ids=pb.TokenIds(ids=[1, 2])))
    assert (ids.token_ids, ids.text) == ((1, 2), None)


def test_a_chat_adds_the_assistants_opening_and_no_special_tokens_unless_told_otherwise() -> None:
    chat = wire.prompt_spec(pb.Request(chat=pb.ChatPrompt(messages_json="[]")))
    assert (chat.messages_json, chat.add_generation_prompt, chat.add_special_tokens) == ("[]", True, False)
    told = pb.ChatPrompt(
        messages_json="[]", add_generation_prompt=False, add_special_tokens=True, continue_final_message=True,
        chat_template="T", chat_template_kwargs_json="{}",
    )  # fmt: skip
    other = wire.prompt_spec(pb.Request(chat=told))
    assert (other.add_generation_prompt, other.add_special_tokens, other.continue_final_message) == (False, True, True)
    assert (other.chat_template, other.chat_template_kwargs_json) == ("T", "{}")


def test_a_grant_says_how_far_ahead_to_reserve() -> None:
    grant = s.Grant(request_id="r1", channel="batch", booked_blocks=4, settles=True, attempt=2)
    assert wire.granted(grant) == m.Granted("r1", "batch", 4, True, 2, 0)
    grant.reserve_output_tokens = 3
    assert wire.granted(grant).reserve_output_tokens == 3


def test_the_scheduler_is_told_which_names_are_adapters() -> None:
    shape = EngineShape("test", 64, 16, 512, 8, 0, "tiny", ("alias", "poet"), adapters=("poet",))
    opened = wire.credits_open("w", "i", shape, 60, m.OpenCredits(())).open
    assert (opened.model, list(opened.model_aliases), list(opened.adapters)) == ("tiny", ["alias", "poet"], ["poet"])


def test_the_scheduler_hears_how_many_blocks_a_completion_holds_at_most() -> None:
    for most in (0, 17):
        shape = EngineShape("vllm", 64, 16, 512, 8, 5, "tiny", most_blocks=most)
        opened = wire.credits_open("w", "i", shape, 60, m.OpenCredits(()))
        assert scheduler_wire.worker_opened(opened, 1).shape.most_blocks == most


def test_a_worker_says_that_it_knows_standing_grants() -> None:
    shape = EngineShape("test", 64, 16, 512, 8, 0, "tiny")
    assert wire.credits_open("w", "i", shape, 60, m.OpenCredits(())).open.takes_standing_grants
    opened = q.WorkOpened(lease_ns=1, max_inflight=2, takes_offers=True)
    assert wire.queue_message(q.QueueToWorker(open=opened)) == m.QueueUp(1, 2, True)


def test_a_standing_grant_is_offered_as_it_was_given() -> None:
    most: dict[str, Any] = {
        "model": "m", "chat": True, "most_prompt_bytes": 9, "most_prompt_tokens": 8, "most_output_tokens": 7,
    }  # fmt: skip
    grant = s.Grant(request_id="standing/1", channel="batch", booked_blocks=4, standing=s.Standing(**most))
    standing = wire.granted(grant).standing
    assert standing == m.Standing("m", True, 9, 8, 7)
    offer = wire.offer(m.SendOffer("standing/1", "batch", standing)).offer
    assert offer == q.Offer(grant="standing/1", channel="batch", **most)
    assert wire.withdraw("standing/1").withdraw == q.Withdraw(grant="standing/1")
    assert wire.granted(s.Grant(request_id="r1")).standing is None


def test_a_request_that_met_a_standing_grant_is_told_of_as_the_queue_announced_it() -> None:
    announced = q.Announce(request_id="r1", channel="batch", prompt_bytes=9, max_tokens=5)
    delivered = wire.delivered(q.Deliver(lease=REF, grant="standing/1", announced=announced))
    assert delivered.met == m.Met("standing/1", announced)
    used = wire.grant_used(m.SendGrantUsed(7, "standing/1", delivered.met.announced)).grant_used
    assert used == s.GrantUsed(epoch=7, grant="standing/1", announced=announced)
    assert wire.delivered(q.Deliver(lease=REF)).met is None


def test_a_tokenizer_ack_tells_what_is_held_and_how_far_the_output_is() -> None:
    sent = wire.tokenizer_ack(m.SendTokenizerAck(7, "r1", 9, 4, 50, 15, 12, 100))
    ack = s.WorkerToScheduler.FromString(sent).tokenizer_ack
    assert (ack.epoch, ack.request_id, ack.seq, ack.held_blocks, ack.prompt_tokens) == (7, "r1", 9, 4, 50)
    assert (ack.reserved_output_tokens, ack.generated_tokens, ack.output_limit_tokens) == (15, 12, 100)


@pytest.mark.parametrize("epoch", [0, 1, 127, 128, 300, 2**21, 2**62, 2**64 - 1])
def test_acks_are_on_the_wire_what_their_generated_messages_are(epoch: int) -> None:
    settled = wire.tokenizer_ack(m.SendTokenizerAck(epoch, "r1", 9, 400, 50_000, 15, 0, 100))
    wanted = s.TokenizerAck(
        epoch=epoch,
        request_id="r1",
        seq=9,
        held_blocks=400,
        prompt_tokens=50_000,
        reserved_output_tokens=15,
        output_limit_tokens=100,
    )
    assert s.WorkerToScheduler.FromString(settled).tokenizer_ack == wanted
    released = wire.completion_ack(m.SendCompletionAck(epoch, "r1", 9, m.Cause.CANCELLED, 700, 1))
    assert s.WorkerToScheduler.FromString(released).completion_ack == s.CompletionAck(
        epoch=epoch, request_id="r1", seq=9, cause=s.RELEASE_CAUSE_CANCELLED, output_tokens=700, preemptions=1
    )


@pytest.mark.parametrize("drain", [Drain(), Drain(7, True), Drain(1 << 40)])
@pytest.mark.parametrize("leaving", [False, True])
def test_both_ends_say_who_drains_alike(drain: Drain, leaving: bool) -> None:
    shape = EngineShape("test", 64, 16, 512, 8, 0, "tiny")
    opened = scheduler_wire.worker_opened(wire.credits_open("w", "i", shape, 60, m.OpenCredits((), drain, leaving)), 1)
    assert (opened.drain, opened.leaving) == (drain, leaving)
    told = scheduler_wire.drain(drain.changed()).drain
    assert Drain(told.version, told.wanted) == drain.changed() > drain
    left = scheduler_wire.from_worker(wire.leaving("SIGTERM"), 9)
    assert isinstance(left, scheduler_messages.WorkerLeaving)
    assert (left.epoch, left.reason) == (9, "SIGTERM")
