"""What `penstock up` says, and which flags it takes for its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from penstock.cli import stack, up
from penstock.cli.config import take_config
from penstock.cli.errors import CommandError
from penstock.cli.stack import Stack, StackPlan, running_stack
from penstock.cli.supervisor import Supervisor
from penstock.queue.v1.queue_pb2 import StatsResponse
from tests.support.fake_queue import FakeQueue, serving
from tests.support.fake_scheduler import FakeScheduler, serving_scheduler
from tests.support.pipes import pipe_with


def test_flags_for_the_workers_may_have_names_of_this_command_behind_two_dashes() -> None:
    own = [
        SimpleNamespace(opts=["--model"], secondary_opts=[]),
        SimpleNamespace(opts=["--a"], secondary_opts=["--no-a"]),
    ]

    def understood(*flags: str) -> list[str]:
        context: Any = SimpleNamespace(args=list(flags), command=SimpleNamespace(params=own))
        return up.flags_for_the_engine(context)

    assert understood("--model", "m", "--no-a", "--dtype=bfloat16") == ["--model", "m", "--no-a", "--dtype=bfloat16"]
    for misspelt, meant in (("--modl=m", "--model"), ("--no-aa", "--no-a")):
        with pytest.raises(CommandError, match=f"unknown flag {misspelt}; did you mean {meant}"):
            understood(misspelt)
    for flag in ("--port=80", "--api-key", "--ssl_keyfile"):
        with pytest.raises(CommandError, match=f"{flag.partition('=')[0]} is a flag of vLLM's HTTP server; in its"):
            understood("--enforce-eager", flag)
    for flag in ("--max-num-queued-reqs=8", "--max_num_queued_tokens"):
        with pytest.raises(CommandError, match=f"{flag.partition('=')[0]} turns away what was accepted; in its place"):
            understood("--enforce-eager", flag)
    for flag in ("--worker-id", "--worker_id=a", "--listen=127.0.0.1:0", "--queue-address", "--scheduler-address"):
        with pytest.raises(CommandError, match=f"{flag.partition('=')[0]}: each worker is given its own"):
            understood("--enforce-eager", flag)


def test_a_gateway_is_left_out_without_its_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up.can_serve_http()
    monkeypatch.setattr(up, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert not up.can_serve_http()
    assert "penstock[gateway]" in capsys.readouterr().out


def test_the_command_to_try_says_what_tls_and_keys_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_CONFIG", "PENSTOCK_TLS_CERT", "PENSTOCK_KEYS", *up.PROXIES):
        monkeypatch.delenv(name, raising=False)
    assert up.gateway_url("127.0.0.1:7415") == "http://127.0.0.1:7415"
    assert "authorization" not in up.example("http://127.0.0.1:7415", "m")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert up.example("http://127.0.0.1:7415", "m").startswith("curl --noproxy '*' http://127.0.0.1:7415/")
    monkeypatch.delenv("http_proxy")
    assert up.example("http://127.0.0.1:7415", "m").startswith("curl http://127.0.0.1:7415/")
    file = tmp_path / "penstock.toml"
    file.write_text(
        '[common]\ntls_ca = "ca.pem"\ntls_cert = "service.pem"\ntls_key = "service-key.pem"\n'
        '[client]\ntls_ca = "ca.pem"\ntls_cert = "client.pem"\ntls_key = "client key.pem"\n'
        '[queue]\nkeys = "keys.toml"\n'
    )
    monkeypatch.setenv("PENSTOCK_CONFIG", str(file))
    url = up.gateway_url("127.0.0.1:7415")
    assert url == "https://127.0.0.1:7415"
    shown = up.example(url, "m")
    for said in ("--cacert ca.pem", "--cert client.pem", "--key 'client key.pem'", '"authorization: Bearer $KEY"'):
        assert said in shown
    monkeypatch.setenv("PENSTOCK_TLS_CERT", "")
    assert up.gateway_url("127.0.0.1:7415").startswith("http:")
    monkeypatch.setenv("PENSTOCK_TLS_CERT", "service.pem")
    assert up.gateway_url("127.0.0.1:7415").startswith("https:")


async def test_a_fleet_whose_scheduler_asks_for_a_key_is_ready_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Locked(FakeScheduler):
        async def Status(self, request: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "an API key is needed")

    class Fine(Supervisor):
        async def failed(self) -> None:
            """Return at once: the test has seen enough."""

    async with serving_scheduler(Locked()) as address:

        @asynccontextmanager
        async def running(plan: StackPlan, say: Callable[[str], None]) -> AsyncIterator[Stack]:
            yield Stack("127.0.0.1:1", address, (), "127.0.0.1:7415", Fine(tmp_path, say))

        monkeypatch.setattr(up, "running_stack", running)
        await up._serve(StackPlan(tmp_path, 1, "", (), 7410))
    said = capsys.readouterr().out
    assert "curl http://127.0.0.1:7415/v1/chat/completions" in said
    assert "ready;" in said


@pytest.mark.parametrize("refusal", ["", "the disk is nearly full"])
async def test_a_fleet_that_takes_no_submits_is_not_just_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refusal: str
) -> None:
    class Fine(Supervisor):
        async def failed(self) -> None:
            """Return at once: the test has seen enough."""

    class Full(FakeQueue):
        async def Stats(self, request: Any, context: Any) -> StatsResponse:
            return StatsResponse(submits_refused=bool(refusal), refusal=refusal)

    async with serving(Full()) as address:

        @asynccontextmanager
        async def running(plan: StackPlan, say: Callable[[str], None]) -> AsyncIterator[Stack]:
            yield Stack(address, "127.0.0.1:1", (), "", Fine(tmp_path, say))

        monkeypatch.setattr(up, "running_stack", running)
        await up._serve(StackPlan(tmp_path, 1, "", (), 7410))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"ready{', but submits are refused: ' if refusal else ''}{refusal}; Ctrl-C stops everything"


async def test_a_scheduler_that_was_started_and_cannot_be_asked_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fine(Supervisor):
        async def failed(self) -> None:
            """Return at once: the test has seen enough."""

    @asynccontextmanager
    async def running(plan: StackPlan, say: Callable[[str], None]) -> AsyncIterator[Stack]:
        yield Stack("127.0.0.1:1", "127.0.0.1:1", (), "127.0.0.1:7415", Fine(tmp_path, say))

    monkeypatch.setattr(up, "running_stack", running)
    await up._serve(StackPlan(tmp_path, 1, "", (), 7410))
    assert "the scheduler is up, and cannot be asked from here: nothing answers on 127.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "gateway", "plain"),
    [
        ("", True, "queue, scheduler, worker, gateway "),
        ("", False, "queue, scheduler, worker "),
        ("service.pem", True, ""),
    ],
)
async def test_a_ca_without_a_certificate_is_noted_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, gateway: bool, plain: str
) -> None:
    class Failing(Supervisor):
        async def ready(self, service: Any) -> str:
            raise CommandError("enough", 70)

        async def stop(self) -> None:
            """There is nothing to stop."""

    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    monkeypatch.setenv("PENSTOCK_TLS_CA", "ca.pem")
    monkeypatch.setenv("PENSTOCK_TLS_CERT", told)
    monkeypatch.setattr(stack, "Supervisor", Failing)
    said: list[str] = []
    with pytest.raises(CommandError, match="enough"):
        async with running_stack(StackPlan(tmp_path, 1, "m", (), 0, gateway=gateway), said.append):
            pass
    notes = [line for line in said if line.startswith("note: tls_ca without tls_cert: ")]
    assert [line.partition("will")[0].rpartition("cert: ")[2] for line in notes] == ([plain] if plain else [])


async def test_where_the_logs_are_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def failing(plan: StackPlan, say: Callable[[str], None]) -> AsyncIterator[Stack]:
        say("starting 1 worker; the engine may take a while")
        raise CommandError("worker-1 ended with status 70", 70)
        yield

    monkeypatch.setattr(up, "running_stack", failing)
    with pytest.raises(CommandError, match="worker-1"):
        await up._serve(StackPlan(tmp_path, 1, "", (), 7410))
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"logs        {tmp_path / 'logs'}"
    assert second.startswith("starting")


def test_a_pipe_is_no_configuration_for_several_services() -> None:
    """The first to read it would leave the others its end, and their defaults."""
    with pipe_with("[queue]\nlease_s = 7\n") as path, pytest.raises(CommandError, match=f"{path}: no regular file"):
        take_config(Path(path))
