"""A worker whose ports are taken says so before it makes an engine, which may take minutes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from penstock.exits import EX_UNAVAILABLE
from services.worker import __main__ as worker


@pytest.fixture
def taken() -> Iterator[str]:
    """The address of a port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_a_port_that_is_taken_is_found_before_there_is_an_engine(
    taken: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_engine(*_: object) -> None:
        raise AssertionError("an engine is made")

    monkeypatch.setattr(worker, "_simulated", no_engine)
    monkeypatch.setattr(worker, "start_logging", lambda *_: None)
    monkeypatch.setattr(worker, "reserve_stdout", lambda: None)
    monkeypatch.setattr(worker, "children_die_with_us", lambda: None)
    flags = {"--listen": "127.0.0.1:0"} | {flag: taken}
    monkeypatch.setattr(
        "sys.argv", ["worker", "--engine", "simulated", *(word for pair in flags.items() for word in pair)]
    )
    with pytest.raises(SystemExit) as ended:
        worker.main()
    assert ended.value.code == EX_UNAVAILABLE
    assert capsys.readouterr().err == f"cannot listen on {taken}: the port is in use by another process\n"
