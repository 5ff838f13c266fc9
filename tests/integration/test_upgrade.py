"""Data directories that earlier programs left when they were killed, taken over by the queue of today.

`tests/data/store-vN.tar.gz` was written by the last revision with schema version N; see tests/support/old_store.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

import penstock
from penstock.files.v1 import files_pb2, files_pb2_grpc
from services.queue.storage.opening import BACKUP_MARK
from tests.support.fleet import penstock as command
from tests.support.old_store import ALONE, BATCH, CANCELLED, FILE_NAME, FILE_TEXT, WAITING, key

pytestmark = pytest.mark.processes

DATA = Path(__file__).parents[1] / "data"
VERSIONS = (1, 2)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def directory(version: int, tmp_path: Path) -> Path:
    with tarfile.open(DATA / f"store-v{version}.tar.gz") as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        packed.extractall(tmp_path / "data")
    return tmp_path / "data"


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Run a queue; yield its address."""
    flags = ["--listen", "127.0.0.1:0", "--data-dir", str(directory)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "OTEL_"))}
    queue = subprocess.Popen(
        [sys.executable, "-m", "services.queue", *flags], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert queue.stdout is not None
        yield queue.stdout.readline().rpartition(" ")[2].strip()
    finally:
        queue.terminate()
        queue.wait(60)


@pytest.fixture
def address(directory: Path) -> Iterator[str]:
    with running(directory) as address:
        yield address


async def test_requests_results_and_keys_are_all_there(address: str) -> None:
    async with penstock.Client(address) as client:
        stats = await client.stats()
        assert sum(channel.ready for channel in stats.channels) == WAITING + ALONE
        again = [
            ack async for ack in client.submit_many(
                {"prompt": f"prompt {n}", "batch": BATCH, "idempotency_key": key(n), "max_tokens": 4}
                for n in range(WAITING + CANCELLED)
            )
        ]  # fmt: skip
        assert all(ack.duplicate for ack in again), "the keys are known"
        names = [ack.request_id for ack in again]
        await client.cancel(*names[CANCELLED:])
        results = [result async for result in client.watch(BATCH)]
        assert [result.request_id for result in results[:CANCELLED]] == names[:CANCELLED]
        assert {result.request_id for result in results} == set(names)
        new = await client.submit(prompt="new", batch=BATCH)
        assert new not in names


async def test_files_are_there(address: str, version: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = files_pb2_grpc.FilesServiceStub(channel)
        files = (await stub.ListFiles(files_pb2.ListFilesRequest(limit=10))).files
        assert [file.filename for file in files] == ([FILE_NAME] if version > 1 else [])
        for file in files:
            read = await stub.ReadFile(files_pb2.ReadFileRequest(file_id=file.file_id))
            assert read.data == FILE_TEXT.encode()


def test_a_store_is_verified_once_its_queue_has_migrated_it(directory: Path) -> None:
    before = command("verify-store", str(directory))
    assert (before.returncode, "starting its queue migrates it" in before.stderr) == (69, True)
    with_new = command("backup", "--data-dir", str(directory), "before-upgrade")
    assert (with_new.returncode, "the version that wrote it can back it up" in with_new.stderr) == (69, True)
    again = command("verify-store", str(directory))
    assert again.stderr == before.stderr, "nothing has been migrated"
    (directory / BACKUP_MARK).write_text("{}")
    backup = command("verify-store", str(directory))
    assert (backup.returncode, "`penstock restore` makes a data directory of it" in backup.stderr) == (69, True)
    (directory / BACKUP_MARK).unlink()
    with running(directory) as address:
        assert address
    after = command("verify-store", str(directory))
    assert after.returncode == 0, after.stdout + after.stderr
