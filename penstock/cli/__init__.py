"""The `penstock` command."""

import os
import sys

OF_GRPC = {
    # What it does around a fork is for a child that goes on with its parent's calls. The children of a command become
    # other programs; what gRPC does in them while it is busy here ends one now and then before it has become one, and
    # tells the terminal each time.
    "GRPC_ENABLE_FORK_SUPPORT": "false",
    # Of a connection that fails it writes to the terminal for every try; the command says so itself, once.
    "GRPC_VERBOSITY": "ERROR",
}
"""Variables of gRPC's own, and what commands want of it where nobody has said otherwise."""


def _import_grpc() -> None:
    """Import gRPC, which reads the variables as it is imported, and leave the services their own choice."""
    wanted = {name: value for name, value in OF_GRPC.items() if name not in os.environ}
    if "grpc" in sys.modules or not wanted:
        return
    os.environ.update(wanted)
    try:
        import grpc  # noqa: F401
    finally:
        for name in wanted:
            del os.environ[name]


# Nothing in this package can be imported before this.
_import_grpc()
