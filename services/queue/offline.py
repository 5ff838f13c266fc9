"""Tools for the store of a queue that does not run: `python -m services.queue.offline verify|backup|restore`.

The `penstock` command becomes them. Exit status: 0 if all is well, 1 if a verification found something, 2 for wrong
arguments, 69 if the directory cannot be used, 130 if Ctrl-C, SIGTERM or the end of the terminal ended it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.exits import EX_FOUND, EX_INTERRUPTED, EX_UNAVAILABLE, EX_USAGE
from services.descriptors import raise_file_limit
from services.queue.core.records import FAMILIES, META, SCHEMA_KEY
from services.queue.storage.backup import BackupError, BackupNameError, backups_of, make_backup, restore
from services.queue.storage.migration import MIGRATED_VERSIONS
from services.queue.storage.opening import written_by_older
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import StoreError, StoreUnreadableError, StoreUnusableError
from services.queue.storage.verify import Verifier, Violation


def verify(directory: Path) -> int:
    """Print every violation of a store's invariants, one a line with its key, then the rows of each family.

    Return the exit status. Raises StoreUnusableError if the store cannot be opened or is of an older version.
    """
    store = RocksdbStore(directory, read_only=True)
    try:
        lost = store.lost_writes()
        found = _told([Violation(META, b"", lost)] if lost else [])
        damaged = _told(Violation(*damage) for damage in store.damage())
        verifier = Verifier(store)
        if not damaged:
            if store.get(META, SCHEMA_KEY) in MIGRATED_VERSIONS:
                raise StoreUnusableError(written_by_older(directory))
            found += _told(verifier.violations())
    finally:
        store.close()
    if damaged:
        print(f"{directory}: {damaged} places cannot be read; what is between the families was not checked")
        return EX_FOUND
    print(f"{directory}: " + ", ".join(f"{verifier.counts[family]} {family}" for family in FAMILIES))
    print(f"{found} violations" if found else "no violations")
    return EX_FOUND if found else 0


def _told(violations: Iterable[Violation]) -> int:
    """Print each violation; return how many there were."""
    count = 0
    for violation in violations:
        print(violation.line())
        count += 1
    return count


def back_up(data_dir: Path, name: str) -> int:
    """Make a backup of a store that no queue uses; return the exit status.

    Raises StoreUnusableError if there is no such store or it is of an older version, and BackupError.
    """
    if not (data_dir / "CURRENT").is_file():
        raise StoreUnusableError(f"there is no store in {data_dir}")
    # Looked at first: to open an older store for writing is to migrate it, and then the older program has no way back.
    looked = RocksdbStore(data_dir, read_only=True)
    older = looked.get(META, SCHEMA_KEY) in MIGRATED_VERSIONS
    looked.close()
    if older:
        raise StoreUnusableError(written_by_older(data_dir))
    store = RocksdbStore(data_dir)
    try:
        backup = make_backup(store, backups_of(data_dir), name, time.time_ns())
    finally:
        store.close()
    print(f"{backup.path}: backup of store {backup.store_id}")
    return 0


def bring_back(backup: Path, data_dir: Path, with_violations: bool) -> int:
    """Make a data directory of a backup."""
    counters = restore(backup, data_dir, time.time_ns(), with_violations)
    print(f"{data_dir}: restored from {backup}; {counters.results} results kept, numbers go on from {counters.seq}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one tool and return the exit status."""
    parser = argparse.ArgumentParser(prog="services.queue.offline")
    tools = parser.add_subparsers(dest="tool", required=True)
    tool = tools.add_parser("verify")
    tool.add_argument("directory", type=Path)
    tool = tools.add_parser("backup")
    tool.add_argument("data_dir", type=Path)
    tool.add_argument("name", nargs="?", default="")
    tool = tools.add_parser("restore")
    tool.add_argument("backup", type=Path)
    tool.add_argument("data_dir", type=Path)
    tool.add_argument("--with-violations", action="store_true")
    options = parser.parse_args(arguments)
    raise_file_limit()
    try:
        if options.tool == "verify":
            return verify(options.directory)
        if options.tool == "backup":
            return back_up(options.data_dir, options.name)
        return bring_back(options.backup, options.data_dir, options.with_violations)
    except (BackupError, StoreError, StoreUnusableError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        if isinstance(error, BackupNameError):
            return EX_USAGE
        found = options.tool == "verify" and isinstance(error, StoreUnreadableError)
        return EX_FOUND if found else EX_UNAVAILABLE
    except OSError as error:
        if error.filename is None:  # not of a directory that one may not read or write, but of the output
            raise
        print(f"penstock: {error.filename}: {error.strerror}", file=sys.stderr)
        return EX_UNAVAILABLE


def interruptible() -> int:
    """Run one tool, which a signal ends once what it has open is closed, and return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # who ignores it (nohup) goes on ignoring it
            signal.signal(number, _interrupt)
    try:
        return main()
    except KeyboardInterrupt:
        return EX_INTERRUPTED


def _interrupt(*_signal: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(interruptible())
