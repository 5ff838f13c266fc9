"""The result of a run as the queue reads it."""

from __future__ import annotations

from penstock.request.v1 import request_pb2 as pb
from services.worker.outputs import RunOutput


def result_of(output: RunOutput) -> pb.Result:
    """Return what a result has of what was generated."""
    result = pb.Result()
    more = b"".join(output.fill(result, None))
    result.MergeFromString(more)
    return result
