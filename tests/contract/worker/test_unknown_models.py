"""What the worker makes of a model that cannot be had, by what vLLM, transformers and the hub's client really raise.

Status 70 is for what another start may find mended, 78 for what has to be said otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.fleet import penstock
from tests.support.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.long]

PROGRAM = """
import json, sys
from services.worker.vllm.engine import prepare
ends = {}
for name, (model, arguments) in json.loads(sys.argv[1]).items():
    try:
        prepare(model, ("tiny",), ["--dtype", "float32", "--enforce-eager", *arguments])
    except SystemExit as ending:
        ends[name] = ending.code
print(json.dumps(ends))
"""


class Hub(BaseHTTPRequestHandler):
    """A hub that has no model, or one that may not be read."""

    def do_GET(self) -> None:
        gated = "/gated/" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ends(asked: dict[str, tuple[str, list[str]]], home: Path, **environment: str) -> dict[str, int]:
    """Return the status with which each model and its arguments are refused."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(asked)],
        env={**os.environ, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_model_that_the_hub_does_not_give_is_not_loaded(tmp_path: Path, hub: str) -> None:
    asked: dict[str, tuple[str, list[str]]] = {
        "unknown": ("nobody/has-this", []), "gated": ("gated/model", []), "no name": ("not a name!!", []),
    }  # fmt: skip
    assert ends(asked, tmp_path, HF_ENDPOINT=hub, HF_HUB_OFFLINE="0") == dict.fromkeys(asked, 70)


def test_nor_is_one_where_the_hub_is_not_reached(tmp_path: Path) -> None:
    asked: dict[str, tuple[str, list[str]]] = {"a model": ("nobody/has-this", [])}
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert ends(asked, tmp_path, HF_ENDPOINT=nowhere, HF_HUB_OFFLINE="0") == {"a model": 70}


def test_without_the_hub_what_is_on_the_disk_tells(tmp_path: Path) -> None:
    """A text with "repo" in it is none of the model for that."""
    tiny, empty, broken = (tmp_path / name for name in ("tiny", "empty", "broken"))
    assert penstock("tiny-model", str(tiny)).returncode == 0
    empty.mkdir()
    broken.mkdir()
    (broken / "config.json").write_text("{not json")
    asked = {
        "not in the cache": ("nobody/has-this", []), "no name": ("not a name!!", []), "broken": (str(broken), []),
        "no model": (str(empty), []), "an argument": (str(tiny), ["--quantization", "repo"]),
        "a window": (str(tiny), ["--max-model-len", "1000000"]),
    }  # fmt: skip
    found = ends(asked, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert found == {
        "not in the cache": 70, "no name": 70, "broken": 70, "no model": 78, "an argument": 78, "a window": 78,
    }  # fmt: skip
