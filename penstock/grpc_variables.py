"""Imports gRPC with what is wanted of its own variables, where nobody has said otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

OF_LIBRARY = {
    # What it does around a fork is for a child that goes on with its parent's calls, which the client refuses to do.
    # While it is busy in the parent, it aborts one child in ten, also of those that never use it, and tells the
    # terminal of each.
    "GRPC_ENABLE_FORK_SUPPORT": "false",
}
"""What the client wants wherever it is used."""


def import_grpc(wanted: Mapping[str, str]) -> None:
    """Import gRPC, which reads its variables as it is imported, unless it is there already; leave them as they were.

    The process's children choose for themselves.
    """
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    if "grpc" in sys.modules or not ours:
        return
    os.environ.update(ours)
    try:
        import grpc  # noqa: F401
    finally:
        for name in ours:
            del os.environ[name]
