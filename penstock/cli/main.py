"""Entry point of the `penstock` command."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from penstock.cli import api_keys, certs, config, operations, requests, run_batch, status, tiny, top, up
from penstock.cli.app import App
from penstock.cli.errors import CommandError
from penstock.cli.interrupt import Interrupted
from penstock.exits import EX_CANNOT_WRITE, EX_INCOMPLETE, EX_INTERRUPTED
from penstock.telling import escape_unknown, give_up_unwritten, tell

ENVIRONMENT = (
    "Environment: PENSTOCK_QUEUE and PENSTOCK_SCHEDULER are addresses, PENSTOCK_CONFIG names a configuration file. "
    "PENSTOCK_KEY is the API key, and PENSTOCK_TLS_CA, PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY name PEM files; "
    "PENSTOCK_KEY_FILE and so on name files that hold what these say."
)
"""At the end of the help of all commands: what is said to each of them besides its flags."""

app = App(
    name="penstock",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=ENVIRONMENT,
)
PASSES_FLAGS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that hand flags they do not know to the engine."""

NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""What a disk says that takes no more of the output."""

app.command("up", context_settings=PASSES_FLAGS_ON)(up.up)
app.command("run-batch", context_settings=PASSES_FLAGS_ON)(run_batch.run_batch)
app.command("submit")(requests.submit)
app.command("get")(requests.get)
app.command("watch")(requests.watch)
app.command("cancel")(requests.cancel)
app.command("status")(status.status)
app.command("top")(top.top)
app.command("drain")(operations.drain)
app.add_typer(requests.dead, name="dead")
app.command("backup")(operations.backup)
app.command("restore")(operations.restore)
app.command("verify-store")(operations.verify_store)
app.command("tiny-model")(tiny.tiny_model)
app.command("certs")(certs.certs)
app.add_typer(config.app, name="config")
app.add_typer(api_keys.app, name="keys")


@app.command("version")
def show_version() -> None:
    """Print the version of Penstock, and whether its services are compiled."""
    try:
        print(version("penstock") + (" (compiled)" if _compiled() else ""))
    except PackageNotFoundError:
        print("unknown (not installed)")


def _compiled() -> bool:
    """Return whether the services are extension modules (setup.py); one of them tells of all."""
    module = find_spec("services.rpc.outbox")
    return module is not None and not (module.origin or "").endswith(".py")


def _version_asked(asked: bool) -> None:
    if asked:
        show_version()
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version_asked, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Feed vLLM engines exactly the requests their KV cache can take."""


def _defaults() -> dict[str, Any]:
    """Return what the configuration file of the environment says to the command that is asked for.

    One that has no use for it is not refused because the file is no good.
    """
    command: Any = typer.main.get_command(app)
    asked = command.commands.get("".join(sys.argv[1:2]))
    return config.defaults_of(command) if asked is not None and config.takes_addresses(asked) else {}


def main() -> None:
    """Run the command line; user errors are one line on stderr and an exit status, never a traceback."""
    escape_unknown(sys.stdout)
    status = _status_of(lambda: app(default_map=_defaults()))
    # What is still to be written is part of the command.
    unwritten = _status_of(sys.stdout.flush)
    sys.exit(status or unwritten)


def _status_of(work: Callable[[], Any]) -> Any:
    """Do the work, say what went wrong, and return the exit status."""
    try:
        work()
    except SystemExit as ended:
        return ended.code
    except CommandError as error:
        tell(f"penstock: {error}", sys.stderr)
        return error.status
    except (KeyboardInterrupt, Interrupted):
        return EX_INTERRUPTED
    except OSError as error:
        if error.errno not in {errno.EPIPE, *NOT_WRITTEN}:
            raise
        give_up_unwritten()
        if error.errno == errno.EPIPE:  # a reader that left, as typer has it
            return EX_INCOMPLETE
        tell(f"penstock: cannot write the output: {error.strerror}", sys.stderr)
        return EX_CANNOT_WRITE
    return 0
