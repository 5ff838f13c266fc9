"""Fetch the wheels the container images are made of into build/wheels/SET, as pip is set up here.

Usage: python tools/fetch_wheels.py light|compile|cpu|cuda...

The images are built from these directories without a network. Wheels are for the images' Python, not for this one's;
what is there already is not fetched again.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "wheels"

PYTHON = "3.11"
"""The images' Python."""

OLDEST_GLIBC, IMAGE_GLIBC = 5, 36
"""Minor versions of glibc 2: the oldest that wheels are built for (manylinux1), and Debian 12's."""

SETS = {
    "light": ("requirements/base.txt", "deploy/docker/packages/init.txt"),
    "compile": ("deploy/docker/packages/compile.txt",),
    "cpu": ("requirements/worker-cpu.txt",),
    "cuda": ("deploy/docker/packages/worker-cuda.txt",),
}
"""Files of exact versions, transitive packages included. A directory each: pip takes the CPU build of torch wherever
it sees both."""


def target_flags(machine: str) -> list[str]:
    """Return pip's flags for the images' Python on `machine` ("x86_64", "aarch64")."""
    flags = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for abi in ("cp" + PYTHON.replace(".", ""), "abi3", "none"):
        flags += ["--abi", abi]
    for minor in range(IMAGE_GLIBC, OLDEST_GLIBC - 1, -1):
        flags += ["--platform", f"manylinux_2_{minor}_{machine}"]
    for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux"):
        flags += ["--platform", f"{name}_{machine}"]
    return [*flags, "--platform", "any"]


def fetch(name: str) -> Path:
    """Fetch a set and return its directory; raises SystemExit if pip cannot get one of the packages."""
    target = WHEELS / name
    target.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    flags = [*target_flags(platform.machine()), "--dest", str(target), "--find-links", str(target)]
    listed = [part for file in SETS[name] for part in ("-r", str(ROOT / file))]
    done = subprocess.run([*command, *flags, *listed], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{done.stderr}\nfetch_wheels: pip could not get what {' '.join(SETS[name])} names")
    return target


def wrong_torch(name: str, wheels: Path) -> str:
    """Return the wheel of torch that does not fit the set, empty if all do."""
    found = [path.name for path in wheels.glob("torch-*.whl") if ("+cpu" in path.name) != (name == "cpu")]
    return found[0] if found else ""


def main(names: Sequence[str]) -> None:
    """Fetch what the command line names."""
    if not names or any(name not in SETS for name in names):
        raise SystemExit(f"usage: python tools/fetch_wheels.py {'|'.join(SETS)}...")
    for name in names:
        target = fetch(name)
        if wrong := wrong_torch(name, target):
            raise SystemExit(
                f"fetch_wheels: {wrong} is not what the {name} image needs. Have pip see PyTorch's CPU index"
                " (PIP_EXTRA_INDEX_URL; pytorch.org, Get Started, CPU) for the CPU image and PyPI alone for the"
                f" CUDA image, remove build/wheels/{name} and start again."
            )
        wheels = list(target.glob("*.whl"))
        print(f"build/wheels/{name}: {len(wheels)} wheels, {sum(path.stat().st_size for path in wheels) / 1e6:.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
