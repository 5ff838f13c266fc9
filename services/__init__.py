"""The services: queue, scheduler, worker and gateway, and what they share."""

import os

GRPC_IO = "-event_engine_client,-event_engine_listener"
"""gRPC's own name for its I/O as it was before 1.80: who waits for an event also reads the socket, while the newer way
wakes two more threads for each message (docs/adr/0013-fewer-threads-to-wake.md)."""

# gRPC reads it as it is imported, and nothing in this package can be imported before this.
os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_IO)
