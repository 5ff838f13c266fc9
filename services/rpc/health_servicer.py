"""gRPC's standard health service (grpc/health/v1): how each service of a process is, told once or whenever it changes.

What grpc-health-checking serves would hold a lock while it writes to a watcher: one who does not read would keep all
others, and the end of the process, waiting for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2

from services.rpc.limits import MAX_HEALTH_WATCHES_OF_HOST
from services.rpc.strict import Doorkeeper

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Status: TypeAlias = health_pb2.HealthCheckResponse.ServingStatus.ValueType

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer:
    """Implements `grpc.health.v1.Health`. It knows no service until it is told that one serves."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._statuses: dict[str, Status] = {}
        self._over = False
        self._changed = asyncio.Event()
        """Set at the next change; there is another one for the change after it."""
        self._watches = Doorkeeper(MAX_HEALTH_WATCHES_OF_HOST)

    def report(self, service: str, serves: bool = True) -> None:
        """Report `service`, "" for the process as a whole, as SERVING or not; after `stop` nothing is said any more."""
        status = SERVING if serves else NOT_SERVING
        if not self._over and self._statuses.get(service) != status:
            self._statuses[service] = status
            self._notify()

    def stop(self) -> None:
        """Report every known service as NOT_SERVING; a Watch ends once it has said so. Waits for nobody."""
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        self._over = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Return how a service is; ends the call with NOT_FOUND if there is none of that name."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no service of that name is served here")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, _request: health_pb2.HealthListRequest, _context: Context) -> health_pb2.HealthListResponse:
        """Return how each known service is."""
        answer = health_pb2.HealthListResponse()
        for service, status in self._statuses.items():
            answer.statuses[service].status = status
        return answer

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Tell how a service is, and again whenever it is otherwise; SERVICE_UNKNOWN of one that is not there."""
        await self._watches.admit(context)
        told: Status | None = None
        while True:
            # Before the status is read: what changes while a slow reader is told it must not be missed.
            changed, over = self._changed, self._over
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != told:
                yield health_pb2.HealthCheckResponse(status=status)
                told = status
            if over:
                return
            await changed.wait()
