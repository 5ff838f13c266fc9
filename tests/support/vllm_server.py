"""vLLM's own OpenAI server, the reference our answers are compared with."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_port
from tests.support.waiting import wait_for

VLLM_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # What vLLM compiles all the same where its engine is eager, as ours does not: seconds of a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
}


@contextmanager
def vllm_server(engine_flags: list[str], log: Path) -> Iterator[str]:
    """Run vLLM's OpenAI server and yield its base address."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), *engine_flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, **VLLM_ENVIRONMENT}, stdout=out, stderr=out)

    def healthy() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    try:
        wait_for(healthy, "vLLM's server", 120)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
