"""A queue on a disk of its own that fills up: what is deleted makes room again, also where there was none left."""

from __future__ import annotations

import multiprocessing
import os
import random
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock as public
from penstock.errors import Unavailable
from services.queue.core.effects import Write
from services.queue.core.records import RESULTS, seq_key
from services.queue.storage.health import StoreHealth
from services.queue.storage.reserve import RESERVE_BYTES, RESERVE_FILE
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import StoreError
from tests.chaos.disk import Disk, leave_the_mounts
from tests.support.committing import HandClock
from tests.support.fleet import Service
from tests.support.ports import free_port
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(180)]

MIB = 1 << 20
PROMPT = "".join(random.Random(1).choices(string.ascii_letters, k=200_000))
WATERMARK_BYTES = 64 * MIB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a disk of so many MiB; return its path."""
    if os.geteuid() != 0 or not leave_the_mounts():
        pytest.skip("mounts are not permitted")
    made: list[Path] = []

    def mount(size_mib: int) -> Path:
        made.append(Disk(tmp_path / "disk", size_mib * MIB).path)
        return made[-1]

    yield mount
    for path in made:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def queue_on(data_dir: Path, log_dir: Path) -> Service:
    address, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    flags = ["--data-dir", str(data_dir), "--disk-free-min-bytes", str(WATERMARK_BYTES), "--metrics-listen", metrics]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "OTEL_"))}
    command = [sys.executable, "-m", "services.queue", "--listen", address, *flags]
    service = Service("queue", command, environment, log_dir / "queue.log", address, metrics)
    service.start()
    return service


def fill(client: public.SyncClient) -> int:
    """Submit until that is refused for want of room; return how many were taken."""
    for taken in range(10_000):
        try:
            client.submit(prompt=PROMPT, batch="b")
        except Unavailable:
            return taken
    raise AssertionError("the disk is not full yet")


def takes_submits(client: public.SyncClient) -> bool:
    return not client.stats().submits_refused and bool(client.submit(prompt="hi"))


def test_a_queue_that_is_emptied_takes_submits_again(disk: Callable[[int], Path], tmp_path: Path) -> None:
    service = queue_on(disk(448) / "queue", tmp_path)
    try:
        with public.SyncClient(service.address, retry_for_s=1) as client:
            taken = fill(client)
            assert taken > 500
            assert client.cancel(batch="b").cancelled == taken
            client.delete(batch="b")
            wait_for(lambda: takes_submits(client), "submits to be taken again")
            wait_for(lambda: client.stats().disk_free_bytes > taken * len(PROMPT) / 2, "the rest of the space")
    finally:
        service.kill()


def test_a_start_on_a_full_disk_and_deletes_there(disk: Callable[[int], Path], tmp_path: Path) -> None:
    data_dir = disk(448) / "queue"
    service = queue_on(data_dir, tmp_path)
    try:
        with public.SyncClient(service.address, retry_for_s=1) as client:
            taken = fill(client)
        service.kill()
        ballast(data_dir.parent)
        service.start()
        with public.SyncClient(service.address, retry_for_s=1) as client:
            assert (data_dir / RESERVE_FILE).stat().st_size == 0
            assert client.cancel(batch="b").cancelled == taken
            client.delete(batch="b")
            wait_for(lambda: takes_submits(client), "submits to be taken again")
            wait_for(lambda: (data_dir / RESERVE_FILE).stat().st_size, "the reserve to be made again")
    finally:
        service.kill()


def ballast(path: Path, free_bytes: int = 0) -> None:
    """Leave no more than that free."""
    stats = os.statvfs(path)
    with (path / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stats.f_bavail * stats.f_frsize - free_bytes)


def test_a_write_that_finds_no_space_and_deletes_after_it(disk: Callable[[int], Path]) -> None:
    # In a process of its own: RocksDB's threads are those of the first store of a process, and see the mounts of then.
    process = multiprocessing.get_context("spawn").Process(target=fill_and_empty, args=(disk(448) / "queue",))
    process.start()
    process.join()
    assert process.exitcode == 0


def fill_and_empty(path: Path) -> None:
    store = RocksdbStore(path, keeps_reserve=True)
    health = StoreHealth(store, HandClock(), WATERMARK_BYTES)
    body, written = os.urandom(200_000), 0
    with pytest.raises(StoreError, match="No space left") as raised:  # noqa: PT012 (which of them fails is the disk's)
        while True:
            store.write([Write(RESULTS, seq_key(written + n), body) for n in range(10)])
            written += 10
    health.failed(raised.value)
    health.probe()
    health.mended()
    assert store.is_reserve_given_up()
    for first in range(0, written, 10):  # every second one: none of its files is dead as a whole
        store.write([Write(RESULTS, seq_key(n), None) for n in range(first, first + 10, 2)])

    def is_made_again() -> bool:
        store.reclaim(8 * MIB, True)
        store.keep_reserve()
        return not store.is_reserve_given_up()

    wait_for(is_made_again, "the reserve to be made again")
    assert store.get(RESULTS, seq_key(1)) == body
    store.close()


def test_small_rows_that_are_deleted_come_back_below_what_a_compaction_takes(disk: Callable[[int], Path]) -> None:
    process = multiprocessing.get_context("spawn").Process(target=fill_with_small_rows, args=(disk(640),))
    process.start()
    process.join()
    assert process.exitcode == 0


def fill_with_small_rows(disk: Path) -> None:
    store, written, kept_bytes = RocksdbStore(disk / "queue", keeps_reserve=True), 0, 256 * MIB
    while store.disk_free_bytes() >= 200 * MIB:
        store.write([Write(RESULTS, seq_key(written + n), os.urandom(2000)) for n in range(500)])
        written += 500
    ballast(disk, 40 * MIB)  # of another program
    for first in range(0, written, 1000):
        store.write([Write(RESULTS, seq_key(n), None) for n in range(first, first + 1000, 2)])
    free_bytes = store.disk_free_bytes()
    assert store.reclaim(32 * MIB, True, kept_bytes) > 64 * MIB
    assert store.disk_free_bytes() > free_bytes + RESERVE_BYTES + 64 * MIB
    assert store.is_reserve_given_up()
    store.keep_reserve()
    assert not store.is_reserve_given_up()
    store.close()
