"""A program with a client may fork: the children that leave the client alone are as good as others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from tests.support.fake_queue import SOON_S, FakeQueue, serving

NAME = "GRPC_ENABLE_FORK_SUPPORT"

IMPORTS = f"""
import importlib.abc, os, sys

class Watcher(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print(os.environ.get({NAME!r}, "unset"))

sys.meta_path.insert(0, Watcher())
exec(sys.argv[1])
print(os.environ.get({NAME!r}, "unset"))
"""
"""Tells what the variable is as gRPC is looked for, and afterwards."""

FORKS = """
import multiprocessing, os, sys
import penstock

client = penstock.SyncClient(sys.argv[1], retry_for_s=5)
client.generate(prompt="p")
processes = multiprocessing.get_context("fork")
for _ in range(20):
    child = processes.Process(target=os.getpid)
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode
client.generate(prompt="p")
client.close()
"""


def environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")} | variables


def told(said: dict[str, str], program: str, way: str) -> list[str]:
    command = [sys.executable, "-c", program, way]
    return subprocess.run(command, env=environment(**said), capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    "way", ["import penstock; penstock.Client", "import penstock.client", "from penstock.errors import NotFound"]
)
def test_grpc_is_told_to_stay_out_of_forks_before_it_is_imported(way: str) -> None:
    assert told({}, IMPORTS, way) == ["false", "unset"]


def test_who_has_said_otherwise_is_heeded() -> None:
    assert told({NAME: "1"}, IMPORTS, "import penstock.client") == ["1", "1"]


def test_who_has_imported_grpc_has_decided() -> None:
    assert told({}, IMPORTS, "import grpc, penstock.client") == ["unset", "unset"]


async def test_children_of_a_program_with_a_client_end_well_and_without_a_word() -> None:
    async with serving(FakeQueue()) as address:
        # Python 3.12 and newer warn of every fork beside threads.
        command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", FORKS, address]
        ended = await asyncio.to_thread(
            subprocess.run, command, env=environment(), capture_output=True, text=True, timeout=SOON_S
        )
    assert (ended.returncode, ended.stderr) == (0, "")
