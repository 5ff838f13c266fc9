"""When the supervisor starts a service again, when it gives one up, and what it says."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from penstock.cli.errors import CommandError
from penstock.cli.supervisor import MOST_FAILED_STARTS, ServiceProcess, Supervisor

SERVICE = """
import subprocess, sys, time
from pathlib import Path
how = Path(sys.argv[3])
if how.read_text() == "broken":
    print("INFO reading the file\\nc.toml:8: worker.engine_stal_s: unknown\\n", file=sys.stderr)
    sys.exit(78)
print("ready: fake on 127.0.0.1:4711", flush=True)
if how.read_text() == "forks":
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    how.with_name("child").write_text(str(child.pid))
    how.write_text("fine")
    print("the engine has died", file=sys.stderr)
    sys.exit(70)
time.sleep(3600)
"""
"""Is as the file says that it is named."""


@pytest.fixture
def how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says how the service is; pauses are short."""
    (tmp_path / "penstock_fake_service.py").write_text(SERVICE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("penstock.cli.supervisor.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("penstock.cli.supervisor.MOST_PAUSE_S", 0.01)
    return tmp_path / "how"


class Lines:
    """What the supervisor says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._more = asyncio.Event()

    def say(self, text: str) -> None:
        self.said.append(text)
        self._more.set()

    async def until(self, count: int) -> None:
        """Return once so many lines have been said; not for ever."""
        async with asyncio.timeout(60):
            while len(self.said) < count:
                self._more.clear()
                await self._more.wait()


async def ready_once(supervisor: Supervisor, how: Path) -> ServiceProcess:
    """Return the service when it has been ready, is broken from now on, and has been killed."""
    how.write_text("fine")
    service = supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", [str(how)])
    await supervisor.ready(service)
    how.write_text("broken")
    kill(service)
    return service


def kill(service: ServiceProcess) -> None:
    assert service.process is not None
    service.process.send_signal(signal.SIGKILL)


KILLED = "fake ended with status -9; starting it again in 0.0 s"
BROKEN = "fake ended with status 78: c.toml:8: worker.engine_stal_s: unknown; starting it again in 0.0 s"


async def test_what_was_ready_once_is_started_again_until_somebody_mends_it(how: Path) -> None:
    lines = Lines()
    supervisor = Supervisor(how.parent / "logs", lines.say, gives_up=False)
    service = await ready_once(supervisor, how)
    await lines.until(1 + MOST_FAILED_STARTS + 1)
    how.write_text("fine")
    while not service.was_ready:
        await asyncio.sleep(0.01)
    kill(service)
    while lines.said[-1] != KILLED:
        await lines.until(len(lines.said) + 1)
    assert lines.said[1:-1] == [BROKEN] * (len(lines.said) - 2), "a line for each start"
    await supervisor.stop()


async def test_who_waits_for_what_a_service_does_is_told_that_it_is_beyond_help(how: Path) -> None:
    lines = Lines()
    supervisor = Supervisor(how.parent / "logs", lines.say)
    await ready_once(supervisor, how)
    with pytest.raises(CommandError, match="engine_stal_s: unknown") as failed:
        await supervisor.failed()
    assert failed.value.status == 78
    assert lines.said == [KILLED]
    await supervisor.stop()


async def test_what_was_never_ready_is_given_up(how: Path) -> None:
    lines = Lines()
    how.write_text("broken")
    supervisor = Supervisor(how.parent / "logs", lines.say, gives_up=False)
    with pytest.raises(CommandError, match="INFO reading the file\nc"):
        await supervisor.ready(supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", [str(how)]))
    assert lines.said == []
    await supervisor.stop()


async def test_the_end_of_a_service_is_seen_though_its_child_has_the_pipe(how: Path) -> None:
    lines = Lines()
    how.write_text("forks")
    supervisor = Supervisor(how.parent / "logs", lines.say)
    service = supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", [str(how)])
    try:
        await lines.until(1)
        assert lines.said == ["fake ended with status 70; starting it again in 0.0 s"]
        while not service.was_ready:
            await asyncio.sleep(0.01)
        await supervisor.stop()
    finally:
        os.kill(int(how.with_name("child").read_text()), signal.SIGKILL)  # it has lived until here


@pytest.mark.parametrize("call", ["nice", "sched_setscheduler"])
async def test_a_sandbox_that_forbids_to_be_nice_keeps_no_service_from_running(
    how: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    how.write_text("fine")
    monkeypatch.setattr(os, call, forbidden)
    supervisor = Supervisor(how.parent / "logs", Lines().say)
    service = supervisor.add("fake", "penstock_fake_service", "127.0.0.1:0", [str(how)], niceness=1)
    assert await supervisor.ready(service) == "127.0.0.1:4711"
    await supervisor.stop()
