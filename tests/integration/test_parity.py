"""At temperature 0 the text equals vLLM's own, line by line, for the same model and engine settings.

Chat lines are compared with `vllm run-batch`. It takes no completions lines (its line model knows chat,
embeddings and scores only), so these are compared with vLLM's OpenAI server, `/v1/completions`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_lines import chat, completion, text_of, words
from tests.support.fleet import ROOT, Fleet, penstock, read_jsonl, write_jsonl
from tests.support.vllm_server import VLLM_ENVIRONMENT

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(300)]


def lines(make: Any, prefix: str) -> list[dict[str, Any]]:
    """Return greedy lines of many shapes for one endpoint."""
    plain = [make(f"{prefix}-{i}", words(i, 1 + 5 * i), max_tokens=1 + 3 * i) for i in range(20)]
    special = [
        make(f"{prefix}-stop", words(3, 9), max_tokens=64, stop=["e", "zz"]),
        make(f"{prefix}-kept-stop", words(3, 9), max_tokens=64, stop="e", include_stop_str_in_output=True),
        make(f"{prefix}-min", words(4, 9), max_tokens=40, min_tokens=30),
        make(f"{prefix}-eos", words(5, 9), max_tokens=40, ignore_eos=True),
        make(f"{prefix}-bias", words(6, 9), logit_bias={"300": 100}),
        make(f"{prefix}-penalty", words(7, 9), max_tokens=40, presence_penalty=1.5, repetition_penalty=1.3),
        make(f"{prefix}-unicode", "naïve café – Ünïcödé 水車 🚰"),
    ]
    return plain + special


def run_batch(fleet: Fleet, source: Path, target: Path) -> list[dict[str, Any]]:
    """Run a file through the fleet."""
    done = penstock(
        "run-batch", "-i", str(source), "-o", str(target),
        "--queue", fleet.queue.address, "--scheduler", fleet.scheduler.address,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + fleet.logs()
    return read_jsonl(target)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST a JSON body and return the answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


def same(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    """Assert that two response bodies agree in what the model decides."""
    mine, reference = ours["choices"][0], theirs["choices"][0]
    assert mine.get("text") == reference.get("text"), where
    assert (mine.get("message") or {}).get("content") == (reference.get("message") or {}).get("content"), where
    assert mine["finish_reason"] == reference["finish_reason"], where
    assert mine["stop_reason"] == reference["stop_reason"], where
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert ours["usage"][key] == theirs["usage"][key], where


@pytest.mark.long
def test_chat_equals_vllm_run_batch(vllm_fleet: Fleet, engine_flags: list[str], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "chat.jsonl", lines(chat, "chat"))
    ours = run_batch(vllm_fleet, source, tmp_path / "ours.jsonl")
    command = [sys.executable, str(ROOT / "tests/support/vllm_run_batch.py"), "-i", str(source)]
    reference = subprocess.run(
        [*command, "-o", str(tmp_path / "theirs.jsonl"), *engine_flags],
        env={**os.environ, **VLLM_ENVIRONMENT}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert reference.returncode == 0, reference.stderr[-3000:]
    theirs = read_jsonl(tmp_path / "theirs.jsonl")
    assert [line["custom_id"] for line in ours] == [line["custom_id"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        same(mine["response"]["body"], other["response"]["body"], str(mine["custom_id"]))
    assert len({text_of(line) for line in ours}) > len(ours) // 2, "the model says the same to everything"


def test_completions_equal_vllm_serve(vllm_fleet: Fleet, vllm_reference: str, tmp_path: Path) -> None:
    wanted = lines(completion, "text")
    wanted.append(completion("ids", [5, 300, 301, 302]))
    wanted.append(completion("echo", words(2, 5), echo=True))
    ours = run_batch(vllm_fleet, write_jsonl(tmp_path / "text.jsonl", wanted), tmp_path / "ours.jsonl")
    for line, mine in zip(wanted, ours, strict=True):
        same(mine["response"]["body"], post(vllm_reference + line["url"], line["body"]), line["custom_id"])
