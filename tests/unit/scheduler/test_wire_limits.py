"""Numbers no worker can mean are refused: sums and windows computed from them would not fit the wire."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.limits import MAX_NAME_BYTES
from penstock.queue.v1.queue_pb2 import Announce, SchedulerToQueue, Window
from penstock.scheduler.v1 import scheduler_pb2 as pb
from services.queue import wire as queue_wire
from services.queue.core.messages import SetWindow
from services.rpc.strict import BadInputError
from services.scheduler import wire
from services.scheduler.core import messages as m
from services.scheduler.core.fleet import MOST_SEQUENCES, MOST_SERVED_MODELS, Fleet

SHAPE: dict[str, Any] = {
    "worker_id": "w", "instance_id": "i", "model": "m", "role": pb.WORKER_ROLE_UNIFIED,
    "capacity_blocks": 10, "block_size": 16, "max_model_len": 100, "max_num_seqs": 4,
}  # fmt: skip


def used(request_id: str, grant: str = "standing/1", size: str = "prompt_bytes", most: int = 1) -> pb.GrantUsed:
    """Return what a worker says when its standing grant has met a request."""
    fields: dict[str, Any] = {"request_id": request_id, size: most}
    return pb.GrantUsed(grant=grant, announced=Announce(**fields))


@pytest.mark.parametrize("field", wire.SHAPE_MOST)
def test_shapes_beyond_belief(field: str) -> None:
    most = wire.SHAPE_MOST[field]
    wire.worker_opened(pb.WorkerToScheduler(open=pb.CreditsOpen(**{**SHAPE, field: most})), 1)
    with pytest.raises(wire.InvalidFieldError, match=rf"^open\.{field}: at most {most}, got {most + 1}$"):
        wire.worker_opened(pb.WorkerToScheduler(open=pb.CreditsOpen(**{**SHAPE, field: most + 1})), 1)


def test_an_adapter_is_one_of_the_names() -> None:
    opened = pb.CreditsOpen(**SHAPE, model_aliases=["alias", "tuned"], adapters=["tuned"])
    assert wire.worker_opened(pb.WorkerToScheduler(open=opened), 1).adapters == ("tuned",)
    opened.adapters.append("m")
    with pytest.raises(wire.InvalidFieldError, match=r"^open\.adapters\[1\]: 'm' is none of model_aliases$"):
        wire.worker_opened(pb.WorkerToScheduler(open=opened), 1)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.WorkerToScheduler(tokenizer_ack=pb.TokenizerAck(request_id="r", held_blocks=1 << 41)), "held_blocks"),
        (
            pb.WorkerToScheduler(tokenizer_ack=pb.TokenizerAck(request_id="r", generated_tokens=1 << 41)),
            "prompt_tokens",
        ),
        (pb.WorkerToScheduler(completion_ack=pb.CompletionAck(request_id="r", output_tokens=1 << 41)), "output_tokens"),
        (pb.WorkerToScheduler(engine_report=pb.EngineReport(blocks_free=1 << 41)), "blocks_free"),
        *[
            (pb.WorkerToScheduler(grant_used=used("r", "g", size, 1 << 41)), f"grant_used.announced.{size}")
            for size in ("prompt_bytes", "prompt_tokens", "max_tokens")
        ],
        (pb.WorkerToScheduler(grant_used=used("")), "grant_used.announced.request_id"),
        (pb.WorkerToScheduler(grant_used=used("r", "")), "grant_used.grant"),
    ],
)
def test_numbers_beyond_belief(message: pb.WorkerToScheduler, field: str) -> None:
    with pytest.raises(wire.InvalidFieldError, match=rf"{field}: "):
        wire.from_worker(message, 1)


@pytest.mark.parametrize("field", ["kv_cache_usage", "kv_cache_usage_ns"])
@pytest.mark.parametrize("usage", [math.nan, math.inf, -math.inf, -0.5])
def test_usages_that_are_no_share(field: str, usage: float) -> None:
    """They would be told to everybody who asks for the status: `top` fails over them, the console's JSON has none."""
    report = pb.EngineReport()
    setattr(report, field, usage)
    with pytest.raises(wire.InvalidFieldError, match=rf"^engine_report\.{field}: must be a finite number"):
        wire.from_worker(pb.WorkerToScheduler(engine_report=report), 1)


@pytest.mark.parametrize("name", ["", "r" * (MAX_NAME_BYTES + 1)], ids=["empty", "too long"])
@pytest.mark.parametrize("ack", ["tokenizer_ack", "completion_ack"])
def test_acks_that_name_no_request(ack: str, name: str) -> None:
    kind = {"tokenizer_ack": pb.TokenizerAck, "completion_ack": pb.CompletionAck}[ack]
    with pytest.raises(wire.InvalidFieldError, match=rf"^{ack}\.request_id: "):
        wire.from_worker(pb.WorkerToScheduler(**{ack: kind(request_id=name)}), 1)


def test_holdings_beyond_belief() -> None:
    holding = pb.Holding(request_id="r", channel="batch", held_blocks=1 << 41)
    with pytest.raises(wire.InvalidFieldError, match=r"^open\.inventory\[0\]\.held_blocks: "):
        wire.worker_opened(pb.WorkerToScheduler(open=pb.CreditsOpen(**SHAPE, inventory=[holding])), 1)


def test_a_window_tells_what_is_served_as_the_queue_understands_it() -> None:
    told = wire.window(m.SetWindow("batch", 64, ("", "a")))
    assert queue_wire.scheduler_message(1, told, ["batch"]) == SetWindow(1, "batch", 64, ("", "a"))
    assert MOST_SERVED_MODELS <= queue_wire.MAX_SERVED_MODELS


@pytest.mark.parametrize("served", [["m"] * (MOST_SERVED_MODELS + 1), ["m" * (MAX_NAME_BYTES + 1)]])
def test_the_queue_refuses_served_models_beyond_belief(served: list[str]) -> None:
    told = SchedulerToQueue(window=Window(channel="batch", limit=1, served_models=served))
    with pytest.raises(BadInputError, match=r"^messages\.window\.served_models: "):
        queue_wire.scheduler_message(1, told, ["batch"])


def test_windows_of_a_fleet_of_liars_fit_the_wire() -> None:
    fleet = Fleet(1.0)
    for epoch in range(1, 5):
        shape = m.EngineShape(10, 16, 100, wire.SHAPE_MOST["max_num_seqs"])
        fleet.open(m.WorkerOpened(epoch, f"w{epoch}", "i", ("m",), shape, ()))
    assert fleet.sequences() == MOST_SEQUENCES
