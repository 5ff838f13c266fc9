"""Make build/compiled/: Penstock as a compiled wheel would install it, for tests and benchmarks of just that.

Usage: python tools/compile_services.py

Run services from there with PYTHONSAFEPATH=1 PYTHONPATH=build/compiled. Nothing is done if no source has changed since
the last time; C files and objects are kept in build/compile, so that a change costs the service it is in.
Needs a C compiler, Python's headers, and mypy with the packages that Penstock imports.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / "build" / "compiled"
TREE = ROOT / "build" / "compile"
STAMP = "penstock.digest"
"""File in COMPILED with the digest of what it was made of."""

SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "penstock", "services")
"""What a wheel is made of."""

PROGRAM = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]), end='')"


def sources() -> list[str]:
    """Return the files of a wheel that git tracks or would track, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *SOURCES]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted({name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()})


def digest(names: Sequence[str]) -> str:
    """Return a digest of the files and of the Python that compiles them."""
    found = hashlib.sha256(sys.version.encode())
    for name in names:
        found.update(name.encode() + b"\0" + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return found.hexdigest()


def copy_sources(names: Sequence[str]) -> None:
    """Make TREE hold these sources and no others; untouched ones keep their time."""
    for old in [path for top in ("penstock", "services") for path in (TREE / top).rglob("*") if path.is_file()]:
        if str(old.relative_to(TREE)) not in names:
            old.unlink()
    for name in names:
        target = TREE / name
        if not target.is_file() or target.read_bytes() != (ROOT / name).read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)


def forget_what_has_no_source() -> None:
    """Remove what was built of modules that are gone; libraries stay, which are built anew if their C code changes."""
    for library in (TREE / "build").glob("lib*"):
        for built in [path for path in library.rglob("*") if path.is_file()]:
            source = TREE / built.relative_to(library).with_name(built.name.partition(".")[0] + ".py")
            if not source.is_file() and not built.name.startswith("compiled__mypyc"):
                built.unlink()


def build_wheel() -> Path:
    """Build the wheel of TREE and return its path; raises SystemExit if that fails."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TREE)],
        cwd=TREE, stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, "PENSTOCK_COMPILE": "1"},
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"compile_services: no wheel:\n{done.stdout[-4000:]}")
    return TREE / done.stdout.splitlines()[-1]


def main() -> None:
    """Compile, unless build/compiled is what it would become."""
    names = sources()
    wanted = digest(names)
    stamp = COMPILED / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    if (TREE / "setup.py").is_file() and (TREE / "setup.py").read_bytes() != (ROOT / "setup.py").read_bytes():
        shutil.rmtree(TREE)  # what is compiled has changed, perhaps
    copy_sources(names)
    forget_what_has_no_source()
    wheel = build_wheel()
    shutil.rmtree(COMPILED, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(COMPILED)
    wheel.unlink()
    stamp.write_text(wanted)
    print(f"{COMPILED.relative_to(ROOT)}: {len(list(COMPILED.rglob('*.so')))} extension modules")


if __name__ == "__main__":
    main()
