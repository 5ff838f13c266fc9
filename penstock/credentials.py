"""Whom a call is made for: the API key that goes with every call of a channel, and whose it is.

A process has one key of its own. One that passes its clients' calls on (the gateway) says so for the task that serves a
client, and then the client's key goes along, or none, and never its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.keys import KeysError
from penstock.loaded import grpc
from penstock.variables import VariableError, said

AUTHORIZATION = "authorization"
"""Metadata with the key, as in HTTP (RFC 6750): "Bearer KEY"."""

TENANT = "x-penstock-tenant"
"""Metadata with the tenant for whom a service acts."""

ENVIRONMENT = "PENSTOCK_KEY"

Identity: TypeAlias = tuple[tuple[str, str], ...]
"""For whom a call is made: the metadata that say so."""

MAX_AUTHORIZATION_BYTES = 1024
"""Of a client's header that is passed on: several times a key, a small part of what one call's metadata may have."""


@dataclass(frozen=True, slots=True)
class Acting:
    """For whom the calls of a task are made."""

    authorization: str | None = None
    """What the client gave, empty if it gave nothing; None: ourselves."""
    tenant: str = ""
    """With our own key: the tenant we act for."""


_OURSELVES = Acting()
_ACTING: ContextVar[Acting] = ContextVar("penstock_acting", default=_OURSELVES)


def pass_on(authorization: str) -> None:
    """Let the calls of this task, from now on, be those of a client that gave this Authorization header ("" if none).

    What cannot be the header of a key becomes one that is refused.
    """
    usable = len(authorization) <= MAX_AUTHORIZATION_BYTES and authorization.isascii() and authorization.isprintable()
    _ACTING.set(Acting(authorization if usable else ""))


def act_for(tenant: str) -> None:
    """Let the calls of this task, from now on, be our own, for a tenant."""
    _ACTING.set(Acting(None, tenant))


def acting() -> Acting:
    """Return for whom the calls of this task are made now."""
    return _ACTING.get()


@contextmanager
def acting_as(whom: Acting) -> Iterator[None]:
    """Let the calls made inside be for `whom`. Not for generators: they share their task."""
    token = _ACTING.set(whom)
    try:
        yield
    finally:
        _ACTING.reset(token)


def acting_for(tenant: str = "") -> AbstractContextManager[None]:
    """Let the calls made inside be our own, for a tenant if one is named. Not for generators: they share their task."""
    return acting_as(Acting(None, tenant))


def key_from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Return what PENSTOCK_KEY holds, or the file that PENSTOCK_KEY_FILE names; empty if neither is set.

    Raises KeysError if both are, or if there is no key in the file.
    """
    try:
        found = said(ENVIRONMENT, environment)
    except VariableError as error:
        raise KeysError(str(error)) from None
    if found is None:
        return ""
    key = found.text.strip()  # a variable that is read from a file often has its last newline
    if found.by != ENVIRONMENT and not key.isascii():
        raise KeysError(f"{found.by}: {environment[found.by]}: there is no key in it")
    return key


def check_sendable(what: str, text: str) -> None:
    """Raise KeysError, without the text, if a call cannot carry it: gRPC would say so at each, in words of its own."""
    if not (text.isascii() and text.isprintable()):
        raise KeysError(f"{what}: must be printable ASCII, without a newline")


def refused_ones(has_keys: bool, proves: Mapping[str, bool]) -> str:
    """Return what is to be said of services that keys would keep out; empty if there is none.

    `has_keys` is whether the queue or the scheduler asks who calls, `proves` by name whether one that calls them can
    tell it: by a key of its own, or a certificate.
    """
    names = ", ".join(name for name, can_tell in proves.items() if not can_tell)
    if not has_keys or not names:
        return ""
    return f"there are keys, and {names} will be refused without {ENVIRONMENT} (of role service) in their environment"


class Credentials:
    """A process's own key. It is in no representation of this object."""

    def __init__(self, key: str = "", tenant: str = "") -> None:
        """Call with `key`, if there is one, for `tenant` where no other is acted for."""
        self._bearer = f"Bearer {key}" if key else ""
        self._tenant = tenant

    def metadata(self) -> Identity:
        """Return what goes with a call that is made now, by this task."""
        acting = _ACTING.get()
        if acting.authorization is not None:
            # Also if it is empty: that says that the call is not ours, whatever certificate the connection has.
            return ((AUTHORIZATION, acting.authorization),)
        pairs: Identity = ((AUTHORIZATION, self._bearer),) if self._bearer else ()
        tenant = acting.tenant or self._tenant
        return (*pairs, (TENANT, tenant)) if tenant else pairs


class KeyedChannel(grpc.aio.Channel):
    """A channel whose calls carry credentials."""

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials) -> None:
        """Call over `channel`, which is closed with this one."""
        self._channel, self._credentials = channel, credentials

    async def __aenter__(self) -> KeyedChannel:
        """Return the channel."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """End every call after `grace` seconds."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the channel's state."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return when the channel leaves a state."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return when the channel is connected."""
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """Return a method of the channel."""
        return self._keyed(self._channel.unary_unary(*arguments, **named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """Return a method of the channel."""
        return self._keyed(self._channel.unary_stream(*arguments, **named))

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """Return a method of the channel."""
        return self._keyed(self._channel.stream_unary(*arguments, **named))

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """Return a method of the channel."""
        return self._keyed(self._channel.stream_stream(*arguments, **named))

    def _keyed(self, method: Any) -> Any:
        credentials = self._credentials

        def call(*arguments: Any, **named: Any) -> Any:
            metadata = credentials.metadata()
            return method(*arguments, metadata=metadata, **named) if metadata else method(*arguments, **named)

        return call
