"""Generate the wire modules under penstock/ from protos/, or check that they are current.

Usage: python tools/generate_protos.py [--check]

The generator is the pinned grpcio-tools (messages, services) with the pinned
mypy-protobuf (type stubs), so the output depends on nothing but the .proto files.
"""

from __future__ import annotations

import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
HAS_SERVICE = ("files", "queue", "scheduler")


def generate(out: Path) -> None:
    """Write every generated module below `out`; raises SystemExit if protoc fails."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    include = str(Path(grpc_tools.__file__).parent / "_proto")
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{include}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for path in generated(out):
        if "_pb2_grpc" in path.name and not path.name.startswith(HAS_SERVICE):
            path.unlink()


def generated(root: Path) -> list[Path]:
    """Return the generated modules below `root`, sorted."""
    return sorted(p for p in (root / "penstock").rglob("*") if p.name.endswith(SUFFIXES))


def drift(fresh: Path) -> list[str]:
    """Return the generated paths that differ between the repository and `fresh`."""
    paths = {p.relative_to(fresh) for p in generated(fresh)}
    paths |= {p.relative_to(ROOT) for p in generated(ROOT)}
    return sorted(
        str(path)
        for path in paths
        if not (ROOT / path).exists()
        or not (fresh / path).exists()
        or not filecmp.cmp(ROOT / path, fresh / path, shallow=False)
    )


def main(check: bool) -> int:
    """Generate in place, or with `check` report drift; returns the exit status."""
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        generate(fresh)
        if check:
            stale = drift(fresh)
            for name in stale:
                print(f"out of date: {name} (run `make protos`)")
            return 1 if stale else 0
        for path in generated(ROOT):
            path.unlink()
        for path in generated(fresh):
            target = ROOT / path.relative_to(fresh)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
