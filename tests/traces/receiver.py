"""A process that takes spans over OTLP/gRPC and writes them down: `python -m tests.traces.receiver PORT FILE`.

It keeps what comes as it comes, each export behind its length in four bytes, so that taking it costs next to nothing
beside the services that are watched.
"""

from __future__ import annotations

import signal
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import IO

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.support.otlp import ReceivedSpan, spans_of

LENGTH = struct.Struct("<I")


class Writer(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP's trace service over a file."""

    def __init__(self, file: IO[bytes]) -> None:
        """Append to `file`."""
        self._file = file
        self._mutex = threading.Lock()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Write one export down."""
        row = request.SerializeToString()
        with self._mutex:
            self._file.write(LENGTH.pack(len(row)) + row)
            self._file.flush()
        return trace_service_pb2.ExportTraceServiceResponse()


def written(path: Path) -> Iterator[ReceivedSpan]:
    """Yield the spans in a file of the receiver."""
    with path.open("rb") as file:
        while head := file.read(LENGTH.size):
            request = trace_service_pb2.ExportTraceServiceRequest()
            request.ParseFromString(file.read(LENGTH.unpack(head)[0]))
            yield from spans_of(request)


def main() -> None:
    """Serve until SIGTERM."""
    port, path = sys.argv[1:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with Path(path).open("ab") as file:
        server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Writer(file), server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        print("ready: receiver", flush=True)
        stop.wait()
        server.stop(5).wait()


if __name__ == "__main__":
    main()
