"""The `penstock` command."""

from penstock.grpc_variables import OF_LIBRARY, import_grpc

OF_COMMANDS = {
    # Of a connection that fails it writes to the terminal for every try; the command says so itself, once.
    "GRPC_VERBOSITY": "ERROR",
}
"""What commands want besides: a program may want to hear of it."""

# Nothing in this package can be imported before this.
import_grpc({**OF_LIBRARY, **OF_COMMANDS})
