"""TLS of a service's own port: gRPC credentials and an HTTP context that both follow a rotation of the files."""

from __future__ import annotations

import ssl
import sys
from typing import Any

import grpc

from penstock.exits import EX_CONFIG
from penstock.tls import Material, TlsError, TlsIdentity
from services.config import ServiceSettings


def server_credentials(identity: TlsIdentity, client_auth: bool) -> grpc.ServerCredentials:
    """Return credentials whose certificate is the present one at every handshake.

    With `client_auth` and a CA, a client without a certificate of that CA is not let in.
    """
    told = identity.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal told
        material = identity.current()
        if material is told:
            return None
        told = material
        return _configuration(material)

    required = client_auth and told.ca is not None
    # None means "as before", which gRPC's documentation says and its type leaves out.
    return grpc.dynamic_ssl_server_credentials(_configuration(told), changed, required)  # type: ignore[arg-type]


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    assert material.key is not None, "who serves TLS has a certificate"
    assert material.cert is not None, "who serves TLS has a certificate"
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)


def http_context(identity: TlsIdentity, client_auth: bool) -> ssl.SSLContext:
    """Return a server's SSL context that takes the present files at every handshake."""
    made: tuple[Material, ssl.SSLContext] = (identity.current(), _context(identity, client_auth))

    def follow(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        nonlocal made
        material = identity.current()
        if material is not made[0]:
            made = (material, _context(identity, client_auth))
        connection.context = made[1]

    first = _context(identity, client_auth)
    # Called at every handshake, whether or not the client names a server (RFC 6066, section 3).
    first.sni_callback = follow
    return first


def _context(identity: TlsIdentity, client_auth: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(identity.files.cert, identity.files.key)
    if identity.files.ca and client_auth:
        context.load_verify_locations(identity.files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class Security:
    """How a service guards its ports."""

    def __init__(self, identity: TlsIdentity | None, client_auth: bool) -> None:
        """Serve plain text without an `identity` that has a certificate."""
        self._identity = identity
        self._client_auth = client_auth

    def add_port(self, server: Any, address: str) -> int:
        """Have a gRPC server listen on "HOST:PORT"; return the port. Raises RuntimeError if it cannot be had."""
        if self._identity is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, server_credentials(self._identity, self._client_auth)))

    def context(self) -> ssl.SSLContext | None:
        """Return what an HTTP server needs; None for plain text."""
        return None if self._identity is None else http_context(self._identity, self._client_auth)


PLAIN = Security(None, False)


def security_of(settings: ServiceSettings) -> Security:
    """Return what the settings ask for; prints the reason and raises SystemExit(78) if the files are no good."""
    if not settings.tls_files:
        return PLAIN
    try:
        identity = TlsIdentity(settings.tls_files)
    except TlsError as error:
        print(error, file=sys.stderr)
        raise SystemExit(EX_CONFIG) from None
    return Security(identity, settings.tls_client_auth) if settings.tls_cert else PLAIN
