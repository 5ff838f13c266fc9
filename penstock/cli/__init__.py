"""The `penstock` command."""

import os
import sys

FORK_HANDLERS = "GRPC_ENABLE_FORK_SUPPORT"
"""gRPC's own name for what it does around a fork, for a child that goes on with its parent's calls. The children of a
command become other programs; what gRPC does in them while it is busy here ends one now and then before it has become
one, and tells the terminal each time."""


def _import_grpc_without_fork_handlers() -> None:
    """Import gRPC, which reads the variable as it is imported, and leave the services their own choice."""
    if "grpc" in sys.modules or FORK_HANDLERS in os.environ:
        return
    os.environ[FORK_HANDLERS] = "false"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[FORK_HANDLERS]


# Nothing in this package can be imported before this.
_import_grpc_without_fork_handlers()
