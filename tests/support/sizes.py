"""Sizes of files that another thread may remove while they are looked at, as RocksDB's own threads do."""

from pathlib import Path


def size_bytes(path: Path) -> int | None:
    """Return the size of a file in bytes, None where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def sizes_bytes(directory: Path, pattern: str) -> list[int]:
    """Return the sizes in bytes of the files of a glob pattern that are there when each is looked at."""
    return [size for path in directory.glob(pattern) if (size := size_bytes(path)) is not None]
