"""Asks a service on this machine how it is: `python -m services.health [--live] [SERVICE] HOST:PORT|URL`.

The health check of the container images. An address asks gRPC's health service
(grpc/health/v1), a URL expects status 200. Both speak TLS where the PENSTOCK_TLS_… variables or the configuration
file of that service say so; its certificate must then name the address asked. Without a service's name the file's
`[common]` is all that is read. Flags of the service are not seen from here.
A queue is well while it takes changes, and lives also while its disk keeps it waiting, which a restart does not mend:
with `--live` only that is asked of it.
Exit status 0: well; 1: not well, with the reason on standard error; 64: no address.
"""

from __future__ import annotations

import http.client
import ssl
import sys
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.config_file import SERVICES, ConfigFileError
from penstock.exits import EX_PROBE_USAGE, EX_UNWELL
from penstock.tls import DIRECT, TlsError, TlsFiles, TlsIdentity

TIMEOUT_S = 4.0
"""Below the 5 s after which the images' health check counts as failed, so that the reason is still told."""

TAKES_WORK = {"queue": "penstock.queue.v1.QueueService"}
"""What gRPC's health service is asked about, by service; of the others the process as a whole."""

LIVE = "--live"


def ask_grpc(address: str, files: TlsFiles, service: str = "") -> str:
    """Return what is wrong with `service` of the gRPC server at "HOST:PORT", "" for all of it; empty if it serves.

    Raises TlsError.
    """
    with open_channel(address, files) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "" if serving else str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def open_channel(address: str, files: TlsFiles) -> grpc.Channel:
    """Return a channel to a server that serves TLS if `files` have a certificate. Raises TlsError."""
    if not files.cert:
        return grpc.insecure_channel(address, options=[DIRECT])
    material = TlsIdentity(files).current()
    credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
    return grpc.secure_channel(address, credentials, options=[DIRECT])


def ask_http(url: str, files: TlsFiles) -> str:
    """Return what is wrong with what answers at an http URL, over TLS if `files` have a certificate; empty if 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
    try:
        if files.cert:
            context = ssl.create_default_context(cafile=files.ca or None)
            context.load_cert_chain(files.cert, files.key)
            connection = http.client.HTTPSConnection(parts.netloc, timeout=TIMEOUT_S, context=context)
        connection.request("GET", parts.path or "/")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return "" if status == http.client.OK else f"status {status}"


def main(arguments: list[str]) -> int:
    """Ask the one address given and return the exit status."""
    live = arguments[:1] == [LIVE]
    *named, address = arguments[live:] or [""]
    if not address or len(named) > 1 or not set(named) <= set(SERVICES):
        names = "|".join(SERVICES)
        print(f"usage: python -m services.health [{LIVE}] [{names}] HOST:PORT|http://HOST:PORT/PATH", file=sys.stderr)
        return EX_PROBE_USAGE
    service = named[0] if named else ""
    try:
        files = TlsFiles.told_to(service)
        if address.startswith("http://"):
            problem = ask_http(address, files)
        else:
            problem = ask_grpc(address, files, "" if live else TAKES_WORK.get(service, ""))
    except (TlsError, ConfigFileError) as error:
        problem = str(error)
    if problem:
        print(f"{address}: {problem}", file=sys.stderr)
    return EX_UNWELL if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
