"""Entry point of the `penstock` command."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import typer

from penstock.cli import tiny
from penstock.cli.errors import EX_INTERRUPTED, CommandError

app = typer.Typer(
    name="penstock",
    help="Feed vLLM engines exactly the requests their KV cache can take.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("tiny-model")(tiny.tiny_model)


@app.command("version")
def show_version() -> None:
    """Print the version of Penstock."""
    try:
        print(version("penstock"))
    except PackageNotFoundError:
        print("unknown (not installed)")


def main() -> None:
    """Run the command line; user errors are one line on stderr and an exit status, never a traceback."""
    try:
        app()
    except CommandError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(EX_INTERRUPTED)
