"""Make dist/: the sdist, and the wheel built from it, so that the sdist is known to be whole.

Usage: python tools/make_dist.py

Needs setuptools, nothing else. The version is the one in pyproject.toml. Times in the archives are those of the last
commit, so that one commit makes one sdist and one wheel, byte for byte: Docker takes what it built of it before.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"


def commit_time() -> str:
    """Return the Unix time of the last commit; the start of the zip format's calendar where there is no git."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "315532800"


def archive_time() -> str:
    """Return the Unix time that the archives bear."""
    return os.environ.get("SOURCE_DATE_EPOCH") or commit_time()


def build(kind: str, source: Path, target: Path) -> Path:
    """Run setuptools' hook `build_KIND` (PEP 517) in the tree `source`; return the archive it leaves in `target`."""
    program = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]), end='')"
    done = subprocess.run(
        [sys.executable, "-c", program, str(target)],
        cwd=source, capture_output=True, text=True, check=False,
        env={**os.environ, "SOURCE_DATE_EPOCH": archive_time()},
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"build_{kind} failed:\n{done.stderr}")
    return target / done.stdout.splitlines()[-1]


def clean_copy(target: Path) -> Path:
    """Copy the files git knows to `target`, so that nothing built or left over gets into an archive."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def settle(sdist: Path) -> None:
    """Give what is in the sdist, which setuptools packs as it lies there, one time, one owner and one order."""
    when, packed = int(archive_time()), sdist.with_suffix(".new")
    with (
        tarfile.open(sdist) as old,
        packed.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=when) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old, key=lambda found: found.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = when, 0, 0, "", ""
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    packed.replace(sdist)


def make_dist(dist: Path) -> tuple[Path, Path]:
    """Empty `dist`, put sdist and wheel there and return their paths."""
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        sdist = build("sdist", clean_copy(scratch / "tree"), dist)
        settle(sdist)
        with tarfile.open(sdist) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
            archive.extractall(scratch)
        wheel = build("wheel", scratch / sdist.name.removesuffix(".tar.gz"), dist)
    return sdist, wheel


if __name__ == "__main__":
    for path in make_dist(DIST):
        print(f"{path.relative_to(ROOT)} {path.stat().st_size / 1e3:.0f} kB")
