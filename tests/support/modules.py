"""Where the processes of a test find their modules."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

COMPILED = "PENSTOCK_COMPILED" in os.environ
"""Whether `make test-compiled` runs: services are extension modules then, which cannot be patched."""


def python_path() -> str:
    """Return PYTHONPATH for a process of a test: where this one was told to look first, then this tree."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
