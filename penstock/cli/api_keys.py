"""`penstock keys`: API keys in a keys file."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.cli.app import App
from penstock.cli.certs import MOST_DAYS
from penstock.cli.errors import CommandError
from penstock.exits import EX_CANNOT_WRITE, EX_NO_INPUT, EX_USAGE
from penstock.keys import DEFAULT_TENANT, NAME, ApiKey, KeysError, Role, digest, new_key, parse, with_key, with_revoked

app = App(help="API keys, in the file that PENSTOCK_KEYS names to the services.", no_args_is_help=True)

FileOption: TypeAlias = Annotated[
    Path, typer.Option("--file", "-f", envvar="PENSTOCK_KEYS", help="The keys file.", metavar="FILE", readable=False)
]
KeyArgument: TypeAlias = Annotated[str, typer.Argument(help="Name of the key.", metavar="ID")]

PRIVATE = 0o600
"""Of a new keys file: the hashes are no secret that opens anything, but who has keys is nobody else's business."""


@app.command()
def create(
    key_id: KeyArgument,
    file: FileOption,
    role: Annotated[Role, typer.Option(help="What the key is for.")] = Role.CLIENT,
    tenant: Annotated[str, typer.Option(help="Whose key it is.")] = DEFAULT_TENANT,
    channel: Annotated[
        list[str] | None, typer.Option(help="Channel it may submit to; can be repeated; default: all of its tenant's.")
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0, max=MOST_DAYS, help="Days it is good for; default: for ever.")
    ] = None,
) -> None:
    """Draw a key, put its hash into FILE (made if it is not there), and print the key: it is not kept anywhere."""
    for what, name in (("ID", key_id), ("--tenant", tenant)):
        if not NAME.fullmatch(name):
            raise CommandError(f"{what}: must be 1 to 64 letters, digits, dashes and underscores", EX_USAGE)
    key = new_key(key_id)
    expires_ns = 0 if days is None else time.time_ns() + int(days * 86_400 * 1e9)
    channels = None if channel is None else frozenset(channel)
    made = ApiKey(key_id, role, tenant, channels, expires_ns, sha256=digest(key))
    _change(file, lambda: with_key(_text(file) if file.exists() else "", made))
    print(f"{file}: the key {key_id} has the role {role}, tenant {tenant}; it is shown this once:", file=sys.stderr)
    print(key)


@app.command("list")
def list_keys(file: FileOption) -> None:
    """List the keys in FILE, without their secrets."""
    try:
        keys = parse(_text(file))
    except KeysError as error:
        raise CommandError(f"{file}: {error}", EX_USAGE) from None
    rows = [("key", "role", "tenant", "channels", "expires", "state")]
    for key in keys.keys.values():
        channels = keys.channels_of(key)
        expires = f"{datetime.fromtimestamp(key.expires_ns / 1e9, UTC):%Y-%m-%d %H:%M}" if key.expires_ns else "-"
        state = "revoked" if key.revoked else "expired" if key.expired(time.time_ns()) else "good"
        names = "all" if channels is None else ",".join(sorted(channels)) or "none"
        rows.append((key.key_id, key.role, key.tenant, names, expires, state))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command()
def revoke(key_id: KeyArgument, file: FileOption) -> None:
    """Mark a key as revoked; services that use FILE refuse it within a second, and end its open calls."""
    _change(file, lambda: with_revoked(_text(file), key_id))
    print(f"{file}: {key_id} is revoked")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror or error}", EX_NO_INPUT) from None
    except UnicodeDecodeError:
        raise CommandError(f"{file}: is not UTF-8", EX_USAGE) from None


def _change(file: Path, change: Callable[[], str]) -> None:
    """Put what `change` makes of the file in its place; no other change is made between its reading and that."""
    try:
        with _only_change(file.parent):
            _replace(file, change())
    except KeysError as error:
        raise CommandError(f"{file}: {error}", EX_USAGE) from None
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror or error}", EX_CANNOT_WRITE) from None


@contextmanager
def _only_change(directory: Path) -> Iterator[None]:
    """Wait for the changes that others make of files here, and let theirs wait.

    It is the directory that is locked: the file gets another one in its place, and a lock file would have an owner.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(file: Path, text: str) -> None:
    """Put a text in the file's place at once: a service that reads meanwhile finds the old or the new one."""
    before = file.stat() if file.exists() else None
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as written:
            written.write(text)
        _give(name, before)
        os.replace(name, file)
    except OSError:
        os.unlink(name)
        raise


def _give(name: str, before: os.stat_result | None) -> None:
    """Let a file be read by whom the one before it could: a service that cannot read it goes on with revoked keys."""
    if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(name, before.st_uid, before.st_gid)
    os.chmod(name, PRIVATE if before is None else before.st_mode & 0o777)
