"""The ports of a stack are looked at before anything of it starts: an engine takes minutes to load."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.cli.errors import CommandError
from penstock.cli.stack import StackPlan, running_stack, unfit_ports, way_out
from tests.support.ports import free_ports

STACK_PORTS = 50
"""More than a stack of three workers takes, with its metrics 40 above."""


@pytest.mark.parametrize(
    ("offset", "name"), [(0, "queue"), (5, "gateway"), (10, "scheduler"), (21, "worker-2"), (43, "worker-2's metrics")]
)
async def test_a_port_that_is_taken_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, name: str
) -> None:
    def no_service(*_: object, **__: object) -> None:
        raise AssertionError("a service is started")

    monkeypatch.setattr("penstock.cli.stack.Supervisor.add", no_service)
    base = free_ports(STACK_PORTS)
    plan = StackPlan(tmp_path, 3, "m", (), base, base + 40, gateway=True)
    with socket.create_server(("127.0.0.1", base + offset)), pytest.raises(CommandError) as failed:
        async with running_stack(plan, print):
            raise AssertionError("nothing can run")
    assert failed.value.status == 69
    assert str(failed.value) == (
        f"{name} cannot listen on 127.0.0.1:{base + offset}: the port is in use by another process\n{way_out(plan)}"
    )


def told(plan: StackPlan) -> list[tuple[str, int]]:
    """Return what is said of its ports, and the exit statuses."""
    return [(str(problem), problem.status) for problem in unfit_ports(plan)]


def test_ports_that_are_none_or_one_twice_are_named() -> None:
    assert told(StackPlan(Path(), 1, "", (), 65530)) == [
        ("scheduler cannot listen on 127.0.0.1:65540: there is no such port", 2),
        ("worker-1 cannot listen on 127.0.0.1:65550: there is no such port", 2),
    ]
    assert told(StackPlan(Path(), 1, "", (), -1))[0] == (
        "queue cannot listen on 127.0.0.1:-1: there is no such port", 2,
    )  # fmt: skip
    base = free_ports(STACK_PORTS)
    assert told(StackPlan(Path(), 1, "", (), base, base + 18)) == [
        (f"worker-1's metrics cannot listen on 127.0.0.1:{base + 20}: worker-1 does", 2)
    ]
    assert not list(unfit_ports(StackPlan(Path(), 9, "", (), 0, gateway=True)))
