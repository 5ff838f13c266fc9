"""The services choose gRPC's I/O before gRPC is loaded, by names that the pinned gRPC knows, and a user's own stay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services import GRPC_IO
from tests.support.modules import python_path

NAMED = "import os, sys, services; assert 'grpc' not in sys.modules; print(os.environ['GRPC_EXPERIMENTS'])"
USED = "import grpc; grpc.insecure_channel('localhost:1').close()"


def run(code: str, experiments: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    environment["PYTHONPATH"] = python_path()
    if experiments is not None:
        environment["GRPC_EXPERIMENTS"] = experiments
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    ("named", "chosen"), [(None, GRPC_IO), ("", ""), ("tcp_frame_size_tuning", "tcp_frame_size_tuning")]
)
def test_the_choice_is_there_before_grpc_and_a_users_own_stays(named: str | None, chosen: str) -> None:
    assert run(NAMED, named).stdout.strip() == chosen


def test_grpc_knows_what_is_chosen() -> None:
    assert sorted(GRPC_IO.split(",")) == ["-event_engine_client", "-event_engine_listener"]
    assert "Unknown experiment" not in run(USED, GRPC_IO).stderr
    # What a gRPC without the older I/O would say.
    assert "Unknown experiment" in run(USED, GRPC_IO + ",-no_such_experiment").stderr
