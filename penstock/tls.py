"""TLS of a connection's near end: which files, whether they changed, and channels that follow a change.

Certificates are rotated by putting new files in the place of the old ones. Whoever opens a connection after that uses
the new ones; those that are open stay open for the calls that they have.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from penstock.config_file import client_table, told
from penstock.credentials import Credentials, KeyedChannel
from penstock.errors import PenstockError
from penstock.loaded import grpc
from penstock.variables import VariableError, said

LOOK_S = 1.0
"""How often somebody who waits for a connection looks whether the files have changed."""

T = TypeVar("T")

ENVIRONMENT = {"ca": "PENSTOCK_TLS_CA", "cert": "PENSTOCK_TLS_CERT", "key": "PENSTOCK_TLS_KEY"}


class TlsError(PenstockError, ValueError):
    """A file of TLS material is missing, unreadable, or does not fit the others; the text names it."""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files; all empty means plain text."""

    ca: str = ""
    """Certificates that the peer's must be signed by; empty means those the system trusts."""
    cert: str = ""
    """Our own certificate, with its chain."""
    key: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> TlsFiles:
        """Return what commands and clients are told: by PENSTOCK_TLS_CA, …_CERT and …_KEY, else in `[client]`.

        Raises ConfigFileError if PENSTOCK_CONFIG names a file that is no good, and TlsError for a variable that is.
        """
        found = {field: _checked(partial(said, name, environment)) for field, name in ENVIRONMENT.items()}
        if any(found.values()):
            return cls(**{field: one.text if one else "" for field, one in found.items()})
        table = _checked(partial(client_table, environment))
        return cls(**{field: table.get(f"tls_{field}", "") for field in ENVIRONMENT})

    @classmethod
    def told_to(cls, service: str) -> TlsFiles:
        """Return what a service is told besides its command line; without the name of one, what all are told.

        Raises ConfigFileError if PENSTOCK_CONFIG names a file that cannot be read, and TlsError for a variable that is
        no good.
        """
        found = {field: _checked(partial(told, service, f"tls_{field}")) for field in ENVIRONMENT}
        return cls(**{field: "" if path is None else str(path) for field, path in found.items()})

    def __bool__(self) -> bool:
        """Return whether TLS is wanted."""
        return bool(self.ca or self.cert or self.key)


def _checked(read: Callable[[], T]) -> T:
    """Return what is read of the environment; raises TlsError if a variable is no good."""
    try:
        return read()
    except VariableError as error:
        raise TlsError(str(error)) from None


def plain_ones(files: Mapping[str, TlsFiles]) -> str:
    """Return what is to be said of services, by name, that have a CA and no certificate; empty if there is none."""
    names = ", ".join(name for name, one in files.items() if one.ca and not one.cert)
    return names and f"tls_ca without tls_cert: {names} will serve in plain text, and ask the others in TLS"


@dataclass(frozen=True)
class Material:
    """What the files held at one moment, PEM; None where there is no file."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


class TlsIdentity:
    """The files' content, read again when they change."""

    def __init__(self, files: TlsFiles) -> None:
        """Read `files`; raises TlsError."""
        if bool(files.cert) != bool(files.key):
            raise TlsError("a TLS certificate and its key are given together or not at all")
        self.files = files
        self._stamp = self._stamps()
        self._material = self._read()

    def current(self) -> Material:
        """Return the present content; what does not fit together yet (a rotation half done) is left for later."""
        try:
            stamp = self._stamps()
            if stamp != self._stamp:
                self._material = self._read()
                self._stamp = stamp
        except TlsError:
            pass  # the next connection looks again; this one uses what was good
        return self._material

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_stamp(path) for path in (self.files.ca, self.files.cert, self.files.key) if path)

    def _read(self) -> Material:
        try:
            if self.files.cert:
                # Finds a key of another certificate, which gRPC would find at every handshake instead.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.files.cert, self.files.key)
            if self.files.ca:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.files.ca)
        except (ssl.SSLError, OSError) as error:
            files = self.files
            named = f"files {files.cert}, {files.key}" if files.cert else f"file {files.ca}"
            raise TlsError(f"TLS {named}: {error}") from None
        return Material(*(_content(path) for path in (self.files.ca, self.files.cert, self.files.key)))


DIRECT = ("grpc.enable_http_proxy", 0)
"""Of every channel of Penstock's own: gRPC would have even the loopback asked for of a proxy that the environment names
for other traffic, and `no_proxy` would have to name every service."""


def open_channel(
    address: str, options: Sequence[tuple[str, Any]], files: TlsFiles, credentials: Credentials | None = None
) -> grpc.aio.Channel:
    """Return a channel to "HOST:PORT", plain or, if there are `files`, over TLS; raises TlsError.

    Its calls carry `credentials`.
    """
    channel: grpc.aio.Channel
    if not files:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = RotatingChannel(address, options, TlsIdentity(files))
    return channel if credentials is None else KeyedChannel(channel, credentials)


@dataclass(frozen=True)
class Access:
    """How a process opens connections to others: the files of its TLS, and its key."""

    tls: TlsFiles = TlsFiles()
    credentials: Credentials | None = None

    def open(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """Return a channel to "HOST:PORT"; raises TlsError."""
        return open_channel(address, options, self.tls, self.credentials)


class RotatingChannel(grpc.aio.Channel):
    """A TLS channel that is made anew, for the calls to come, when its files change.

    gRPC fixes a channel's credentials when it is made; one that outlived its certificate could never connect again.
    """

    def __init__(self, address: str, options: Sequence[tuple[str, Any]], identity: TlsIdentity) -> None:
        """Connect lazily."""
        self._address, self._options, self._identity = address, options, identity
        self._material = identity.current()
        self._channel = self._made()
        self._retired: WeakSet[grpc.aio.Channel] = WeakSet()
        """Channels of old files, each for as long as somebody holds a call over it, or a method that was not called
        since; then gRPC closes it."""

    def current(self) -> grpc.aio.Channel:
        """Return the channel of the present files."""
        material = self._identity.current()
        if material is not self._material:
            self._retired.add(self._channel)
            self._material = material
            self._channel = self._made()
        return self._channel

    def _made(self) -> grpc.aio.Channel:
        material = self._material
        credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
        return grpc.aio.secure_channel(self._address, credentials, options=self._options)

    async def __aenter__(self) -> RotatingChannel:
        """Return the channel."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """End every call after `grace` seconds."""
        for channel in (*self._retired, self._channel):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the present channel."""
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return when the channel leaves a state, or when there is another, of new files; `get_state` tells its state.

        One of files that the peer does not trust any more never leaves its failure.
        """
        channel = self._channel
        waiting = asyncio.ensure_future(channel.wait_for_state_change(last_observed_state))
        try:
            while self.current() is channel:
                done, _ = await asyncio.wait({waiting}, timeout=LOOK_S)
                if done:
                    return waiting.result()
        finally:
            waiting.cancel()

    async def channel_ready(self) -> None:
        """Return when the present channel is connected."""
        while (state := self.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await self.wait_for_state_change(state)

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """Return a method of the present channel."""
        return _Method(self, "unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """Return a method of the present channel."""
        return _Method(self, "unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """Return a method of the present channel."""
        return _Method(self, "stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """Return a method of the present channel."""
        return _Method(self, "stream_stream", arguments, named)


class _Method:
    """One method of whichever channel is the present one."""

    def __init__(self, owner: RotatingChannel, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._owner, self._kind, self._arguments, self._named = owner, kind, arguments, named
        self._channel: grpc.aio.Channel | None = None
        self._callable: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        channel = self._owner.current()
        if channel is not self._channel:
            self._channel = channel
            self._callable = getattr(channel, self._kind)(*self._arguments, **self._named)
        call = self._callable(*arguments, **named)
        call.add_done_callback(partial(_hold, channel))
        return call


def _hold(_channel: grpc.aio.Channel, _call: object) -> None:
    """Do nothing: whoever is to be told of the end of a call holds on to its channel."""


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise TlsError(f"TLS file {path}: {error.strerror}") from None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _content(path: str) -> bytes | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise TlsError(f"TLS file {path}: {error.strerror}") from None
