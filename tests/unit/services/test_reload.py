"""A running service reads its configuration again: when, what it takes up, and what it leaves alone."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.config_file import ConfigFile, ConfigUnreadableError
from services import reload
from services.config_reading import read_settings
from services.queue.settings import QueueSettings
from services.reload import APPLIED, REFUSED, UNCHANGED, Reloader
from services.scheduler.settings import SchedulerSettings
from tests.support.pipes import pipe_with

CHANNELS = "[[channels]]\nname = 'interactive'\nweight = {}\n"


class Rig:
    """A reloader over a file, and what it handed over."""

    def __init__(self, path: Path, flags: list[str] | None = None) -> None:
        self.path = path
        self.write(1)
        arguments = ["--config", str(path), *(flags or [])]
        self.applied: list[QueueSettings] = []
        self.settings = read_settings(QueueSettings, arguments).settings
        self.arguments = arguments
        self.begin()

    def begin(self) -> None:
        """Make the reloader, with the settings that were read first."""
        self.registry = CollectorRegistry()
        self.reloader = Reloader(self.settings, "queue", self.applied.append, self.arguments, self.registry)

    def write(self, weight: object, rest: str = "") -> None:
        """Put another file in the place of the present one, as `mv` does."""
        new = self.path.with_suffix(".new")
        new.write_text(CHANNELS.format(weight) + rest)
        os.replace(new, self.path)

    def count(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("penstock_queue_config_reloads_total", {"outcome": outcome})

    def is_refused(self) -> float | None:
        return self.registry.get_sample_value("penstock_queue_config_refused")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "penstock.toml")


async def reach(what: str, fact: object) -> None:
    """Wait until `fact()` holds; the test's own limit ends a wait that is in vain."""
    while not fact():  # type: ignore[operator]
        await asyncio.sleep(0.005)


async def test_new_channels_are_handed_over(rig: Rig) -> None:
    rig.write(3, "[queue]\ndefault_channel = 'interactive'\n")
    assert await rig.reloader.reload() == APPLIED
    assert rig.applied[0].channels["interactive"].weight == 3
    assert await rig.reloader.reload() == UNCHANGED
    assert len(rig.applied) == 1
    assert (rig.count(APPLIED), rig.count(UNCHANGED), rig.count(REFUSED)) == (1, 1, 0)


async def test_a_damaged_file_changes_nothing_is_told_and_counted(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    many = ("0", "'", "1\nwaight = 2", "inf", "1e-320", "[" * 5000, "{a" + ".a" * 5000 + " = 1}", "1" * 5000)
    for damaged in many:
        rig.write(damaged)
        assert await rig.reloader.reload() == REFUSED
    assert not rig.applied
    assert rig.count(REFUSED) == len(many)
    assert f"{rig.path}:4: channels[0].waight: unknown; did you mean weight?" in caplog.text
    rig.path.unlink()
    assert await rig.reloader.reload() == REFUSED
    rig.write(2)
    assert await rig.reloader.reload() == APPLIED


async def test_metrics_say_that_a_file_is_refused_until_one_is_taken(rig: Rig) -> None:
    assert rig.is_refused() == 0
    for weight, refused in (("'", 1), ("'", 1), (1, 0), ("[", 1), (2, 0)):
        rig.write(weight)
        await rig.reloader.reload()
        assert rig.is_refused() == refused


async def test_what_needs_a_start_is_named_and_left(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.write(2, "[queue]\nlease_s = 5\n")
    assert await rig.reloader.reload() == APPLIED
    assert "lease_s has changed in the configuration; it takes effect at the next start" in caplog.text
    assert rig.applied[0].lease_s == 60


async def test_what_a_flag_says_stays(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "penstock.toml", ["--channels", '{"interactive": {"weight": 7}}'])
    rig.write(3)
    assert await rig.reloader.reload() == UNCHANGED


async def test_a_changed_file_is_read_once_it_stands_still(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.02)
    task = asyncio.create_task(rig.reloader.run())
    try:
        rig.write(2)
        await reach("the new weight", lambda: len(rig.applied) == 1)
        rig.write(3)
        await reach("the next one", lambda: len(rig.applied) == 2)
        assert [settings.channels["interactive"].weight for settings in rig.applied] == [2, 3]
        rig.path.write_text("[[chan")
        await reach("a refusal", lambda: rig.count(REFUSED) == 1)
        rig.write(4)
        await reach("the good file", lambda: len(rig.applied) == 3)
    finally:
        task.cancel()
    assert rig.count(REFUSED) == 1
    assert rig.count(UNCHANGED) == 0


async def test_what_changes_while_the_service_starts_is_taken_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are read long before a large store is open."""
    monkeypatch.setattr(reload, "LOOK_S", 0.01)
    rig.write(2)
    rig.begin()
    task = asyncio.create_task(rig.reloader.run())
    await reach("the new weight", lambda: rig.applied)
    task.cancel()


async def test_a_file_that_cannot_be_read_for_a_while_is_told_once_and_read_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.01)
    reads = 0
    read = ConfigFile.read

    def failing(path: str, unknown_tables: list[str] | None = None) -> ConfigFile:
        nonlocal reads
        reads += 1
        if reads <= 3:
            raise ConfigUnreadableError(f"{path}: cannot be read: Too many open files")
        return read(path, unknown_tables)

    monkeypatch.setattr(ConfigFile, "read", failing)
    rig.write(2)
    task = asyncio.create_task(rig.reloader.run())
    await reach("the new weight", lambda: rig.applied)
    task.cancel()
    assert (reads, rig.count(REFUSED)) == (4, 1)


async def test_a_file_is_not_read_between_two_looks_that_differ(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stamps: list[reload.Stamp] = [(1, 1, 1), (2, 1, 2), (3, 1, 3), (3, 1, 3), None, None]
    monkeypatch.setattr(rig.reloader, "_stamp", lambda: stamps.pop(0))
    monkeypatch.setattr(reload, "LOOK_S", 0.0)
    looks = [await rig.reloader._is_time() for _ in range(6)]
    assert looks == [False, False, False, True, False, False]


async def test_a_file_that_was_read_is_not_read_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.0)
    rig.write(2)
    assert [await rig.reloader._is_time() for _ in range(2)] == [False, True]
    await rig.reloader.reload()
    assert [await rig.reloader._is_time() for _ in range(3)] == [False] * 3


async def test_sighup_has_it_read_at_once(rig: Rig) -> None:
    task = asyncio.create_task(rig.reloader.run())
    await asyncio.sleep(0)
    rig.write(5)
    os.kill(os.getpid(), signal.SIGHUP)
    await reach("the new weight", lambda: rig.applied)
    os.kill(os.getpid(), signal.SIGHUP)
    await reach("that nothing is new", lambda: rig.count(UNCHANGED) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_a_file_sighup_does_no_harm() -> None:
    registry = CollectorRegistry()
    settings = read_settings(QueueSettings, []).settings
    reloader = Reloader(settings, "queue", lambda _: None, [], registry)
    task = asyncio.create_task(reloader.run())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGHUP)
    labels = {"outcome": UNCHANGED}
    await reach("a look", lambda: registry.get_sample_value("penstock_queue_config_reloads_total", labels) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("kind", [QueueSettings, SchedulerSettings])
async def test_a_pipe_is_read_once_and_not_followed(
    kind: type[QueueSettings | SchedulerSettings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(reload, "LOOK_S", 0.0)
    with pipe_with(CHANNELS.format(7)) as path:
        registry = CollectorRegistry()
        settings = read_settings(kind, ["--config", path]).settings
        applied: list[object] = []
        reloader = Reloader(settings, "queue", applied.append, ["--config", path], registry)
        assert [await reloader._is_time() for _ in range(3)] == [False] * 3
        task = asyncio.create_task(reloader.run())
        await reach("the notice", lambda: f"{path} is no regular file: it was read once" in caplog.text)
        os.kill(os.getpid(), signal.SIGHUP)
        labels = {"outcome": UNCHANGED}
        await reach("a look", lambda: registry.get_sample_value("penstock_queue_config_reloads_total", labels) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert "SIGHUP is without effect" in caplog.text
    assert not applied
