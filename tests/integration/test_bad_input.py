"""Bad input: each case gets a clear message, and nothing else is lost."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import SIMULATED_FLAGS
from tests.support.batch_lines import chat, completion, words
from tests.support.fleet import Fleet, Service, penstock, read_jsonl
from tests.support.ports import free_port
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

MIB = 1024 * 1024


def encoded(line: dict[str, Any]) -> bytes:
    """Return a line of a batch file as bytes."""
    return json.dumps(line).encode()


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "broken JSON": (b'{"custom_id": "x", "method": ', r"JSON"),
    "not an object": (b"[1, 2]", r"object"),
    "unknown field in body": (encoded(completion("u1", "hi", shiny=True)), r"shiny"),
    "unknown model": (encoded(completion("m1", "hi", model="no-such-model")), r"no-such-model"),
    "negative max_tokens": (encoded(completion("n1", "hi", max_tokens=-3)), r"max_tokens"),
    "max_tokens of the wrong type": (encoded(completion("n2", "hi", max_tokens="many")), r"max_tokens"),
    "temperature out of range": (encoded(chat("n3", "hi", temperature=-1)), r"temperature"),
    "duplicate custom_id": (encoded(completion("good-0", "hi")), r"good-0"),
    "no custom_id": (encoded({k: v for k, v in completion("c", "hi").items() if k != "custom_id"}), r"custom_id"),
    "wrong method": (encoded({**completion("w1", "hi"), "method": "GET"}), r"method"),
    "wrong url": (encoded({**completion("w2", "hi"), "url": "/v1/embeddings"}), r"url|/v1/embeddings"),
    "streaming asked for": (encoded(chat("s1", "hi", stream=True)), r"stream"),
    "not UTF-8": (b'{"custom_id": "\xff\xfe", "method": "POST"}', r"UTF-8"),
    "64 MiB line": (encoded(completion("big", "x" * 64 * MIB)), r"MiB|bytes"),
    "prompt longer than the window": (encoded(completion("long", words(1, 2000))), r"512"),
}


@pytest.mark.vllm
def test_bad_lines_are_answered_and_the_rest_runs(vllm_fleet: Fleet, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    numbers: dict[str, int] = {}
    with source.open("wb") as out:
        number = 0
        for i, (name, (line, _)) in enumerate(BAD_LINES.items()):
            out.write(encoded(completion(f"good-{i}", f"good {i}")) + b"\n" + line + b"\n")
            number += 2
            numbers[name] = number
    done = penstock(
        "run-batch", "-i", str(source), "-o", str(target),
        "--queue", vllm_fleet.queue.address, "--scheduler", vllm_fleet.scheduler.address,
    )  # fmt: skip
    assert done.returncode in {0, 1}, done.stderr
    answers = read_jsonl(target)
    assert len(answers) == 2 * len(BAD_LINES), "one answer per line"
    good = [a for a in answers if str(a["custom_id"]).startswith("good-") and a["error"] is None]
    assert len(good) == len(BAD_LINES), "every good line ran"
    for name, (_, pattern) in BAD_LINES.items():
        answer = answers[numbers[name] - 1]
        text = json.dumps([answer["error"], answer["response"]])
        assert re.search(pattern, text), f"{name}: {text[:500]}"
        assert answer["error"] is not None or answer["response"]["status_code"] >= 400, name
    assert answers[numbers["broken JSON"] - 1]["error"]["line"] == numbers["broken JSON"]
    assert "512" in json.dumps(answers[numbers["prompt longer than the window"] - 1]), "the window"


def refused(service: Service) -> tuple[int, str]:
    """Start a service that must not start; return its exit status and what it said."""
    service.start(wait=False)
    return service.wait_exit(), service.log()


def test_port_in_use(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for name in ("queue", "scheduler"):
            flags = ["--data-dir", str(tmp_path / "data")] if name == "queue" else []
            status, said = refused(fleet.add(name, ["--listen", address, *flags]))
            assert status == 69
            assert address in said
            assert "in use" in said


def test_data_directory_in_use(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    second = Fleet(fleet.directory / "second").add("queue", ["--data-dir", str(fleet.directory / "queue")])
    status, said = refused(second)
    assert status == 69
    assert str(fleet.directory / "queue") in said
    assert re.search(r"in use|locked|another process", said)


def test_model_path_missing(tmp_path: Path) -> None:
    worker = Fleet(tmp_path).add("worker-w1", ["--model", str(tmp_path / "nothing-here")])
    status, said = refused(worker)
    assert status == 78
    assert "nothing-here" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("service", ["queue", "scheduler", "worker"])
def test_unknown_setting(service: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"services.{service}", "--log-level", "loud"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 78
    assert "--log-level" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("service", ["queue", "scheduler", "worker", "gateway"])
def test_a_full_disk_for_what_it_says_keeps_no_service_from_serving(service: str, tmp_path: Path) -> None:
    port = free_port()
    flags = {"queue": ["--data-dir", str(tmp_path / "data")], "worker": SIMULATED_FLAGS}.get(service, [])
    command = [sys.executable, "-m", f"services.{service}", "--listen", f"127.0.0.1:{port}", *flags]

    def listens() -> bool:
        assert process.poll() is None, "it has ended"
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", port)) == 0

    with open("/dev/full", "w") as full, subprocess.Popen(command, stdout=full, stderr=full) as process:
        try:
            wait_for(listens, "the service to listen")
            process.terminate()
            assert process.wait(60) in {0, -15}
        finally:
            process.kill()


def test_a_worker_without_scheduler_waits_and_says_so(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    nobody = f"127.0.0.1:{free_port()}"
    worker = fleet.add("worker-w1", ["--queue-address", nobody, "--scheduler-address", nobody, *SIMULATED_FLAGS])
    try:
        worker.start()
        wait_for(lambda: f"scheduler: waiting for {nobody}" in worker.log(), "the worker to say that it waits")
        assert worker.running
    finally:
        fleet.close()


def test_nothing_listens(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(encoded(completion("a", "hi")) + b"\n")
    nobody = f"127.0.0.1:{free_port()}"
    done = penstock("run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--queue", nobody)
    assert done.returncode != 0
    assert nobody in done.stderr
    assert "penstock up" in done.stderr
    assert "Traceback" not in done.stderr


def test_input_file_missing(tmp_path: Path) -> None:
    done = penstock("run-batch", "-i", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    assert done.returncode != 0
    assert "none.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_file_of_keys_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[keys.a]\nrole = "boss"\n')
    fleet = Fleet(tmp_path, {"PENSTOCK_KEYS": str(path)})
    try:
        queue = fleet.add("queue", ["--data-dir", str(tmp_path / "data")])
        queue.start(wait=False)
        assert queue.wait_exit() == 78
        assert f"{path}: keys.a.role: must be one of client, operator, service" in queue.log()
    finally:
        fleet.close()
