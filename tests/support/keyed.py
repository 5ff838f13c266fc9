"""A fleet with API keys under mutual TLS, and its callers over gRPC and HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

import penstock as public
from penstock.credentials import Credentials
from penstock.errors import BROKE_WHILE_WRITING
from penstock.keys import digest, new_key
from penstock.tls import TlsFiles, open_channel
from tests.support.fleet import Fleet
from tests.support.otlp import OtlpReceiver


@dataclass
class Keyfile:
    """The keys file of a fleet, and the keys that are in it."""

    path: Path
    tables: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    head: str = 'service_certificates = ["service"]\n'

    def put(self, name: str, fields: str) -> str:
        """Put a key, new or with other fields; return it."""
        key = self.keys.setdefault(name, new_key(name))
        self.tables[name] = f'[keys.{name}]\n{fields}\nsha256 = "{digest(key).hex()}"\n'
        return key

    def write(self) -> None:
        """Put the file into place."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(self.head + "\n".join(self.tables.values()))
        fresh.replace(self.path)


@dataclass
class RawReceiver(OtlpReceiver):
    """Keeps what it is sent as it came, so that nothing in it is overlooked."""

    exports: list[bytes] = field(default_factory=list)

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep one export."""
        self.exports.append(request.SerializeToString())
        return super().Export(request, context)


@dataclass
class Keyed:
    """A fleet with keys."""

    fleet: Fleet
    keyfile: Keyfile
    certs: Path
    traces: RawReceiver

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(*(str(self.certs / name) for name in ("ca.pem", "client.pem", "client-key.pem")))

    def key(self, name: str) -> str:
        return self.keyfile.keys.get(name, name)

    def client(self, name: str, files: TlsFiles | None = None) -> public.Client:
        """Return a client with the key of this name, or with the name as its key."""
        return public.Client(
            self.fleet.queue.address,
            self.fleet.scheduler.address,
            retry_for_s=0.2,
            tls=self.files if files is None else files,
            api_key=self.key(name),
        )

    async def status(self, name: str, call: Callable[[Any], Awaitable[Any]], files: TlsFiles | None = None) -> Any:
        """Return the status that a call of this key ends with, None if it is answered."""
        credentials = Credentials(self.key(name)) if name else None
        tls = self.files if files is None else files
        async with open_channel(self.fleet.queue.address, [], tls, credentials) as channel:
            while True:
                try:
                    await call(channel)
                except grpc.aio.AioRpcError as error:
                    if error.details() == BROKE_WHILE_WRITING:
                        continue  # grpc.aio has lost the status of a stream that was still being written
                    return error.code()
                return None

    def connection(self) -> http.client.HTTPSConnection:
        """Return a connection to the gateway, not opened yet."""
        context = ssl.create_default_context(cafile=self.files.ca)
        context.load_cert_chain(self.files.cert, self.files.key)
        return http.client.HTTPSConnection(self.fleet.services["gateway"].address, context=context, timeout=60)

    def http(self, name: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """Return status, JSON body and headers of a request to the gateway with a key."""
        connection = self.connection()
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if name:
            fields.setdefault("authorization", f"Bearer {self.key(name)}")
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            fields.setdefault("content-type", "application/json")
        try:
            connection.request(method, path, data, fields)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            return response.status, json.loads(content), response.headers
        return response.status, content, response.headers
