"""gRPC as the client wants it: its modules take it from here, whichever of them is imported first."""

from penstock.grpc_variables import OF_LIBRARY, import_grpc

import_grpc(OF_LIBRARY)

import grpc  # noqa: E402

__all__ = ["grpc"]
