"""The worker as a process, between a queue and a scheduler of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.queue.v1 import queue_pb2 as q
from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2 as s
from tests.support.fake_peers import Peers, until
from tests.support.fleet import Service, alive, descendants
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SIMULATED = ("--engine", "simulated", "--num-gpu-blocks-override", "129", "--block-size", "16")
SLOW = (*SIMULATED, "--profile", "cpu-small")


def worker_service(directory: Path, peers: Peers, flags: Sequence[str]) -> Service:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "services.worker", "--listen", address, "--worker-id", "w1"]
    command += ["--queue-address", f"127.0.0.1:{peers.queue_port}"]
    command += ["--scheduler-address", f"127.0.0.1:{peers.scheduler_port}", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return Service("worker", command, environment, directory / "worker.log", address, "")


@pytest_asyncio.fixture
async def peers() -> AsyncIterator[Peers]:
    peers = Peers()
    await peers.start()
    yield peers
    await peers.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Service]]:
    services: list[Service] = []
    yield services
    for service in services:
        if service.running:
            service.kill()


async def start(services: list[Service], directory: Path, peers: Peers, flags: Sequence[str]) -> Service:
    service = worker_service(directory, peers, flags)
    services.append(service)
    service.start(wait=False)
    await until(lambda: "ready: worker on" in service.log() or not service.running, "the ready line", 120)
    assert service.running, service.log()
    return service


def request(name: str, prompt: str = "hello", **sampling: object) -> pb.Request:
    return pb.Request(
        request_id=name, channel="batch", text=prompt, batch="b", client_reference=f"ref {name}",
        sampling=pb.SamplingParams(**{"max_tokens": 8, **sampling}),  # type: ignore[arg-type]
    )  # fmt: skip


async def test_a_request_goes_through_settle_run_release_and_completion(
    tmp_path: Path, peers: Peers, started: list[Service]
) -> None:
    await start(started, tmp_path, peers, SIMULATED)
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    opened = peers.scheduler.opens[0]
    assert (opened.worker_id, opened.capacity_blocks, opened.block_size) == ("w1", 128, 16)
    peers.scheduler.grant(peers.queue.add(request("r1", "x" * 40, max_tokens=8, ignore_eos=True)), blocks=100)
    result = await until(lambda: peers.queue.result("r1"), "the result")
    assert result.outcome == pb.OUTCOME_COMPLETED
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (40, 8)
    assert result.choices[0].finish_reason == pb.FINISH_REASON_LENGTH
    # The rest of the names are the queue's to fill in.
    assert result.timings.delivered_unix_ns <= result.timings.engine_started_unix_ns
    assert result.timings.first_token_unix_ns <= result.timings.last_token_unix_ns
    (settled,) = peers.scheduler.settled
    assert (settled.held_blocks, settled.prompt_tokens, settled.reserved_output_tokens) == (3, 40, 8)
    released = await until(lambda: peers.scheduler.release_of("r1"), "the release")
    assert (released.cause, released.output_tokens) == (s.RELEASE_CAUSE_COMPLETED, 8)
    assert released.seq > settled.seq
    assert released.epoch == settled.epoch == 1


async def test_a_reservation_grows_with_its_output_block_by_block(
    tmp_path: Path, peers: Peers, started: list[Service]
) -> None:
    # So slow that a report is due between one block and the next.
    await start(started, tmp_path, peers, SLOW)
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    name = peers.queue.add(request("r1", "x" * 40, max_tokens=100, ignore_eos=True))
    peers.scheduler.grant(name, blocks=3, reserve_output_tokens=2)
    released = await until(lambda: peers.scheduler.release_of("r1"), "the release")
    settled = peers.scheduler.settled
    assert (released.cause, released.output_tokens) == (s.RELEASE_CAUSE_COMPLETED, 100)
    # 41 tokens at first, 139 at the end; each ACK comes two tokens before the next block is needed.
    assert [ack.held_blocks for ack in settled] == [3, 4, 5, 6, 7, 8, 9]
    assert [ack.generated_tokens for ack in settled] == [0, 8, 24, 40, 56, 72, 88]
    seqs = [*(ack.seq for ack in settled), released.seq]
    assert seqs == sorted(set(seqs))
    assert {ack.output_limit_tokens for ack in settled} == {100}


async def test_the_frame_of_a_release_carries_a_report_that_shows_the_free_blocks(
    tmp_path: Path, peers: Peers, started: list[Service]
) -> None:
    await start(started, tmp_path, peers, SIMULATED)
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    peers.scheduler.grant(peers.queue.add(request("r1")), blocks=10)
    await until(lambda: peers.scheduler.release_of("r1"), "the release")
    frame = next(f for f in peers.scheduler.frames if any(m.HasField("completion_ack") for m in f.messages))
    kinds = [message.WhichOneof("message") for message in frame.messages]
    assert kinds[-1] == "engine_report"
    assert frame.messages[-1].engine_report.blocks_free == 128


async def test_a_client_cancel_aborts_in_the_engine_and_completes_as_cancelled(
    tmp_path: Path, peers: Peers, started: list[Service]
) -> None:
    await start(started, tmp_path, peers, SLOW)
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    peers.queue.watched.add("r1")
    peers.scheduler.grant(peers.queue.add(request("r1", max_tokens=1800, ignore_eos=True)), blocks=128)
    await until(lambda: peers.queue.tokens, "tokens")
    peers.queue.cancel("r1", q.CANCEL_REASON_CLIENT)
    result = await until(lambda: peers.queue.result("r1"), "the result")
    assert result.outcome == pb.OUTCOME_CANCELLED
    released = await until(lambda: peers.scheduler.release_of("r1"), "the release")
    assert released.cause == s.RELEASE_CAUSE_CANCELLED
    assert 0 < released.output_tokens < 1800
    offset = 0
    for delta in peers.queue.tokens:
        assert delta.offset == offset
        offset += len(delta.token_ids)


async def test_a_lost_queue_costs_nothing_and_the_completion_is_sent_again(
    tmp_path: Path, peers: Peers, started: list[Service]
) -> None:
    service = await start(started, tmp_path, peers, SLOW)
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    peers.queue.recording = False
    peers.scheduler.grant(peers.queue.add(request("r1", max_tokens=4, ignore_eos=True)), blocks=10)
    peers.scheduler.grant(peers.queue.add(request("r2", max_tokens=200, ignore_eos=True)), blocks=20)
    await until(lambda: peers.queue.result("r1"), "the first completion, unrecorded")
    await peers.stop("queue")
    await until(lambda: peers.scheduler.release_of("r2"), "the second request to end meanwhile")
    peers.queue.completes.clear()
    peers.queue.recording = True
    await peers.start_queue()
    first = await until(lambda: peers.queue.result("r1"), "the completion again")
    second = await until(lambda: peers.queue.result("r2"), "the other completion")
    assert first.outcome == second.outcome == pb.OUTCOME_COMPLETED
    assert {ref.request_id for ref in peers.queue.opens[-1].held} == {"r1", "r2"}
    assert service.log().count("waiting for") == 1


async def test_a_new_scheduler_is_told_the_whole_inventory(
    tmp_path: Path, peers: Peers, started: list[Service]
) -> None:
    await start(started, tmp_path, peers, SLOW)
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    peers.scheduler.grant(peers.queue.add(request("r1", max_tokens=900, ignore_eos=True)), blocks=100)
    await until(lambda: peers.scheduler.settled, "the settling")
    held = peers.scheduler.settled[0].held_blocks
    await peers.stop("scheduler")
    await peers.start_scheduler()
    await until(lambda: len(peers.scheduler.opens) == 2, "the second open")
    (holding,) = peers.scheduler.opens[1].inventory
    assert (holding.request_id, holding.held_blocks, holding.channel) == ("r1", held, "batch")
    released = await until(lambda: peers.scheduler.release_of("r1"), "the release")
    assert released.epoch == 2
    assert released.seq > holding.seq


async def test_what_can_never_fit_is_rejected_with_both_numbers(
    tmp_path: Path, peers: Peers, started: list[Service]
) -> None:
    await start(started, tmp_path, peers, (*SIMULATED, "--max-model-len", "100", "--watermark-blocks", "124"))
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    assert peers.scheduler.opens[0].capacity_blocks == 4
    for name, prompt in (("long", "x" * 101), ("full", "x" * 100), ("wide", "x" * 70)):
        peers.scheduler.grant(peers.queue.add(request(name, prompt)), blocks=4)
    codes = {}
    for name in ("long", "full", "wide"):
        result = await until(partial(peers.queue.result, name), f"the result of {name}")
        assert result.outcome == pb.OUTCOME_REJECTED
        codes[name] = result.error.code
        assert result.error.message
    assert codes == {
        "long": "context_length_exceeded", "full": "context_length_exceeded", "wide": "pool_too_small",
    }  # fmt: skip
    assert {ack.cause for ack in peers.scheduler.released} == {s.RELEASE_CAUSE_REJECTED}


async def test_a_refusal_that_quotes_what_no_message_can_carry_ends_its_request_alone(
    tmp_path: Path, peers: Peers, started: list[Service]
) -> None:
    await start(started, tmp_path, peers, SIMULATED)
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    tools = pb.ToolUse(tools_json="[{}]", tool_choice_json='{"function": {"name": "\\ud800"}}')
    wrong = pb.Request(request_id="r1", channel="batch", chat=pb.ChatPrompt(messages_json="[{}]", tools=tools))
    peers.scheduler.grant(peers.queue.add(wrong), blocks=10)
    refused = await until(lambda: peers.queue.result("r1"), "the refusal")
    assert (refused.outcome, refused.error.param) == (pb.OUTCOME_REJECTED, "tool_choice")
    assert '"\\ud800"' in refused.error.message
    peers.scheduler.grant(peers.queue.add(request("r2")), blocks=10)
    await until(lambda: peers.queue.result("r2"), "the result of another")


async def test_a_refused_claim_sends_the_credits_home(tmp_path: Path, peers: Peers, started: list[Service]) -> None:
    await start(started, tmp_path, peers, SIMULATED)
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    peers.scheduler.grant("nobody knows it", blocks=5)
    released = await until(lambda: peers.scheduler.release_of("nobody knows it"), "the release")
    assert released.cause == s.RELEASE_CAUSE_CLAIM_REFUSED


async def test_sigterm_finishes_what_runs_and_exits_0(tmp_path: Path, peers: Peers, started: list[Service]) -> None:
    service = await start(started, tmp_path, peers, SLOW)
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    peers.queue.watched.add("r1")
    peers.scheduler.grant(peers.queue.add(request("r1", max_tokens=100, ignore_eos=True)), blocks=10)
    await until(lambda: peers.queue.tokens, "tokens")
    service.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    result = await until(lambda: peers.queue.result("r1"), "the result")
    assert result.usage.completion_tokens == 100
    await until(lambda: not service.running, "the exit")
    assert service.process.returncode == 0  # type: ignore[union-attr]
    assert peers.scheduler.leaving


async def test_after_the_grace_what_still_runs_is_handed_back(
    tmp_path: Path, peers: Peers, started: list[Service]
) -> None:
    service = await start(started, tmp_path, peers, (*SLOW, "--shutdown-grace-s", "0.2"))
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    peers.queue.watched.add("r1")
    peers.scheduler.grant(peers.queue.add(request("r1", max_tokens=1900, ignore_eos=True)), blocks=128)
    await until(lambda: peers.queue.tokens, "tokens")
    service.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    await until(lambda: not service.running, "the exit")
    assert service.process.returncode == 0  # type: ignore[union-attr]
    assert [ref.request_id for ref in peers.queue.given_back] == ["r1"]
    assert peers.scheduler.release_of("r1").cause == s.RELEASE_CAUSE_LEASE_LOST  # type: ignore[union-attr]


@pytest.mark.parametrize("whole", [False, True], ids=["the tokenizer", "the nursery"])
async def test_the_tokenizers_death_costs_the_worker_nothing_and_its_nurserys_ends_it(
    tmp_path: Path, peers: Peers, started: list[Service], whole: bool
) -> None:
    service = await start(started, tmp_path, peers, SLOW)
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    peers.queue.watched.add("r1")
    peers.scheduler.grant(peers.queue.add(request("r1", max_tokens=1900, ignore_eos=True)), blocks=128)
    await until(lambda: peers.queue.tokens, "tokens")
    family = descendants(service.pid)
    (nursery,) = (pid for pid in family if descendants(pid))
    os.kill(nursery if whole else (family - {nursery}).pop(), signal.SIGKILL)
    if whole:
        await until(lambda: not service.running, "the exit")
        assert service.process.returncode == 70  # type: ignore[union-attr]
        assert [ref.request_id for ref in peers.queue.given_back] == ["r1"], "the engine lived: no attempt has failed"
    else:
        await until(lambda: descendants(service.pid) - family, "its successor")
        peers.queue.cancel("r1", q.CANCEL_REASON_CLIENT)
        await until(lambda: peers.queue.result("r1"), "the cancelled result")
        peers.scheduler.grant(peers.queue.add(request("r2", "x" * 5000, max_tokens=1)), blocks=128)
        assert (await until(lambda: peers.queue.result("r2"), "a result")).error.code == "context_length_exceeded"


async def test_kill_9_leaves_no_process_behind(tmp_path: Path, peers: Peers, started: list[Service]) -> None:
    service = await start(started, tmp_path, peers, SIMULATED)
    family = descendants(service.pid)
    assert family
    service.kill()
    await until(lambda: not any(alive(pid) for pid in family), "the children's end")


async def test_health_is_served(tmp_path: Path, peers: Peers, started: list[Service]) -> None:
    service = await start(started, tmp_path, peers, SIMULATED)
    async with grpc.aio.insecure_channel(service.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stdout_lines = [line for line in service.log().splitlines() if line.startswith("ready:")]
    assert stdout_lines == [f"ready: worker on {service.address}"]


def run_worker(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.worker", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--engine", "nope"), "engine"),
        ((), "--model is required"),
        (("--model", "/nowhere/at/all"), "there is nothing at /nowhere/at/all"),
        (("--engine", "simulated", "--nonsense", "1"), "--nonsense"),
        (("--engine", "simulated", "--block-size", "many"), "--block-size"),
        (("--engine", "simulated", "--watermark-blocks", "99999"), "watermark_blocks"),
        (("--engine", "simulated", "--tool-call-parser", "hermes"), "--tool-call-parser"),
    ],
)
def test_wrong_settings_are_named_and_exit_78(flags: Sequence[str], said: str) -> None:
    ended = run_worker(*flags)
    assert ended.returncode == 78
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_exits_69(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = run_worker("--engine", "simulated", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert ended.returncode == 69
    assert "in use" in ended.stderr


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (("--model", "org/name", "--nonsense", "3"), 78, "unrecognized arguments: --nonsense"),
        (("--model", "org/name", "--max-model-len", "many"), 78, "--max-model-len"),
        (("--model", "org/name", "--tool-call-parser", "nope"), 78, "no parser called 'nope'"),
        (("--model", "nobody/has-this"), 70, "cannot load the model nobody/has-this"),
    ],
)
def test_what_vllm_refuses_at_the_start_is_one_clear_line(
    flags: Sequence[str], status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = run_worker(*flags)
    assert ended.returncode == status
    assert said in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


VLLM_FLAGS = (
    "--served-model-name", "tiny", "--max-model-len", "512", "--num-gpu-blocks-override", "65",
    "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "16",
)  # fmt: skip


@pytest.mark.vllm
async def test_real_vllm_runs_cancels_and_its_engines_death_ends_the_worker_with_70(
    tmp_path: Path, peers: Peers, started: list[Service], tiny_model: Path
) -> None:
    service = await start(started, tmp_path, peers, ("--model", str(tiny_model), *VLLM_FLAGS))
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    opened = peers.scheduler.opens[0]
    assert (opened.capacity_blocks, opened.block_size, opened.model) == (64, 32, "tiny")
    assert opened.byte_bounded_tokenizer
    greedy = {"temperature": 0.0, "ignore_eos": True}
    peers.scheduler.grant(peers.queue.add(request("r1", "The gate", max_tokens=40, **greedy)), blocks=16)
    peers.scheduler.grant(peers.queue.add(request("r2", "The gate", max_tokens=40, **greedy)), blocks=16)
    first = await until(lambda: peers.queue.result("r1"), "the first result")
    second = await until(lambda: peers.queue.result("r2"), "the second result")
    assert first.outcome == pb.OUTCOME_COMPLETED, first.error
    assert first.usage.completion_tokens == 40
    assert first.choices[0].text == second.choices[0].text != ""
    peers.queue.watched.add("r3")
    peers.scheduler.grant(peers.queue.add(request("r3", "A", max_tokens=480, **greedy)), blocks=16)
    await until(lambda: peers.queue.tokens, "tokens")
    peers.queue.cancel("r3", q.CANCEL_REASON_CLIENT)
    cancelled = await until(lambda: peers.queue.result("r3"), "the cancelled result")
    assert cancelled.outcome == pb.OUTCOME_CANCELLED
    await until(lambda: peers.scheduler.reports[-1].blocks_free == 64, "all blocks free")
    family = descendants(service.pid)
    assert len(family) >= 2, "tokenizer and engine core"
    peers.queue.tokens.clear()
    peers.queue.completes.clear()
    peers.queue.watched.add("r4")
    peers.scheduler.grant(peers.queue.add(request("r4", "A", max_tokens=500, ignore_eos=True)), blocks=16)
    await until(lambda: peers.queue.tokens, "tokens")
    await engine_killed(service, peers)
    (complete,) = peers.queue.completes
    assert (complete.lease.request_id, complete.failure.code) == ("r4", "engine_dead")
    assert complete.failure.message == "the engine core ended (signal 9)"
    assert peers.scheduler.release_of("r4").cause == s.RELEASE_CAUSE_FAILED  # type: ignore[union-attr]


@pytest.mark.vllm
@pytest.mark.long
async def test_the_death_of_an_idle_engine_ends_the_worker_with_70(
    tmp_path: Path, peers: Peers, started: list[Service], tiny_model: Path
) -> None:
    service = await start(started, tmp_path, peers, ("--model", str(tiny_model), *VLLM_FLAGS))
    await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
    await engine_killed(service, peers)
    assert not peers.queue.completes


async def engine_killed(service: Service, peers: Peers) -> None:
    """Kill the engine's process; return once its worker, which has told the scheduler, has ended with all it had."""
    family = descendants(service.pid)
    core = next(pid for pid in family if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(core, signal.SIGKILL)
    await until(lambda: not service.running, "the exit")
    assert service.process.returncode == 70  # type: ignore[union-attr]
    assert peers.scheduler.leaving
    assert service.log().count("ERROR worker the engine core ended (signal 9)") == 1
    assert not any(alive(pid) for pid in family)


async def test_a_worker_whose_name_another_one_keeps_ends_and_says_so(
    tmp_path: Path, peers: Peers, started: list[Service]
) -> None:
    peers.scheduler.name_taken = True
    service = worker_service(tmp_path, peers, SIMULATED)
    module = service.command.index("-m")
    impatient = "from services.rpc import names; names.ASK_S = 0.0; from services.worker.__main__ import main; main()"
    service.command = [*service.command[:module], "-c", impatient, *service.command[module + 2 :]]
    service.start(wait=False)
    started.append(service)
    await until(lambda: not service.running, "the end of the worker")
    assert service.wait_exit() == 78
    assert "another instance of 'w1' is connected" in service.log()
    assert "Traceback" not in service.log()
    assert not peers.queue.opens, "it would have taken the leases of the other"
