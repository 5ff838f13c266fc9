"""`penstock certs`: a CA and certificates for development."""

from __future__ import annotations

import ipaddress
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.errors import CommandError
from penstock.exits import EX_CANNOT_WRITE, EX_UNAVAILABLE, EX_USAGE

MOST_DAYS = 36_500
"""A hundred years: what is good for ever needs no date, and a date has to be one."""

HOST_NAME = re.compile(r"(?=.{1,253}$)(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
"""A name that a certificate can be for; of others (`xn--…`) in their ASCII form."""

LOCAL = ("localhost", "127.0.0.1", "::1")


def certs(
    directory: Annotated[
        Path, typer.Argument(help="Where to write; an existing CA in it is used.", metavar="DIR", readable=False)
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or IP address that services are reached by, besides localhost; can be repeated."),
    ] = None,
    days: Annotated[float, typer.Option(min=0, max=MOST_DAYS, help="Days the certificates are good for.")] = 90.0,
) -> None:
    """Make a development CA with a certificate for services and one for clients; again: new certificates, same CA."""
    for name in host or ():
        if not (HOST_NAME.fullmatch(name) or _is_address(name)):
            raise CommandError(f"--host: {name!r} is no host name or IP address", EX_USAGE)
    try:
        from penstock.dev_ca import Authority
    except ImportError as error:
        hint = "install penstock[certs]"
        raise CommandError(f"certificates need {error.name}: {hint}", EX_UNAVAILABLE) from None
    try:
        authority = Authority.open(directory)
        authority.issue(directory, "service", days, [*LOCAL, *(host or ())])
        authority.issue(directory, "client", days, None)
    except OSError as error:
        raise CommandError(f"cannot write {directory}: {error.strerror or error}", EX_CANNOT_WRITE) from None
    except ValueError as error:
        raise CommandError(f"{directory}: {error}", EX_USAGE) from None
    here = directory.resolve()
    # The variables are the same ones: a shell that is given all of it is one for services.
    for whom, name, lead in (("the services", "service", ""), ("their clients", "client", "# ")):
        print(f"# for {whom}:")
        for variable, file in (("CA", "ca"), ("CERT", name), ("KEY", f"{name}-key")):
            print(f"{lead}export PENSTOCK_TLS_{variable}={shlex.quote(f'{here}/{file}.pem')}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
