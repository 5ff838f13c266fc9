"""What is shown of a service's log, and how large it becomes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from penstock.cli.service_log import KEPT_BYTES, TAIL_BYTES, TAIL_LINES, ServiceLog


def _wrote(log: ServiceLog, text: str) -> None:
    with log.open() as file:
        file.write(text.encode())


def test_the_end_of_the_present_life_is_shown(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path / "queue.log")
    assert log.tail() == ""
    _wrote(log, "an earlier life\n")
    with log.open() as file:
        assert log.tail() == ""
        file.write("".join(f"line {i}\n" for i in range(50)).encode())
        file.flush()
        assert log.tail().splitlines() == [f"line {i}" for i in range(50 - TAIL_LINES, 50)]


def test_it_is_not_read_as_a_whole(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path / "queue.log")
    _wrote(log, "x" * 2 * TAIL_BYTES)
    assert len(log.tail()) == TAIL_BYTES


def test_who_cuts_it_short_while_it_is_written_may(tmp_path: Path) -> None:
    """As `logrotate` with `copytruncate` does."""
    log = ServiceLog(tmp_path / "queue.log")
    _wrote(log, "an earlier life\n")
    with log.open() as file:
        os.truncate(log.path, 0)
        file.write(b"after\n")
        file.flush()
        assert log.tail() == "after"


def test_a_large_one_is_set_aside_at_the_next_start(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path / "queue.log")
    older = tmp_path / "queue.log.1"
    older.write_text("older still")
    _wrote(log, "first\n")
    os.truncate(log.path, KEPT_BYTES)
    _wrote(log, "second\n")
    assert (older.read_text(), log.path.stat().st_size) == ("older still", KEPT_BYTES + len("second\n"))
    _wrote(log, "third\n")
    assert (log.path.read_text(), log.tail(), older.stat().st_size) == (
        "third\n",
        "third",
        KEPT_BYTES + len("second\n"),
    )


def test_a_directory_that_was_cleared_away_is_made_again(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path / "logs" / "queue.log")
    log.path.parent.mkdir()
    _wrote(log, "an earlier life\n")
    shutil.rmtree(log.path.parent)
    _wrote(log, "after\n")
    assert log.tail() == "after"
