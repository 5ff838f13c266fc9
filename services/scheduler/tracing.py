"""The scheduler's spans: the wait for a grant, and the life of a reservation."""

from __future__ import annotations

from opentelemetry import trace

from services.scheduler.core import messages as m
from services.telemetry import Attribute, Telemetry


class CreditSpans:
    """Open `scheduler.credits` spans by epoch and request. Does nothing while telemetry is off."""

    def __init__(self, telemetry: Telemetry) -> None:
        """Export through `telemetry`."""
        self._telemetry = telemetry
        self._open: dict[tuple[int, str], trace.Span] = {}

    @property
    def enabled(self) -> bool:
        """Whether there are spans at all."""
        return self._telemetry.enabled

    def granted(self, grant: m.Grant, now_ns: int) -> str:
        """Record the wait, open the reservation's span, and return the wait's traceparent for the worker to join."""
        if not self._telemetry.enabled:
            return grant.traceparent
        attributes = _attributes(
            request_id=grant.request_id,
            worker_id=grant.worker_id,
            channel=grant.channel,
            attempt=grant.attempt,
            booked_blocks=grant.booked_blocks,
        )
        waited = grant.announced_ns, now_ns
        return self._begin((grant.epoch, grant.request_id), grant.traceparent, waited, attributes)

    def met(self, met: m.Met, now_ns: int) -> None:
        """Open the span of a reservation that was there before its request, which waited for nothing."""
        if not self._telemetry.enabled:
            return
        request = met.request
        attributes = _attributes(
            request_id=request.request_id,
            worker_id=met.worker_id,
            channel=request.channel,
            attempt=request.attempt,
            booked_blocks=met.booked_blocks,
        )
        attributes["penstock.grant.standing"] = True
        self._begin((met.epoch, request.request_id), request.traceparent, (now_ns, now_ns), attributes)

    def _begin(
        self,
        held: tuple[int, str],
        traceparent: str,
        waited: tuple[int, int],
        attributes: dict[str, Attribute],
    ) -> str:
        """Record the wait, from and until when, and open the span of what is `held`; return the wait's traceparent."""
        since_ns, now_ns = waited
        joined = self._telemetry.record("scheduler.grant", traceparent, min(since_ns, now_ns), now_ns, attributes)
        self._open[held] = self._telemetry.start("scheduler.credits", traceparent, now_ns, attributes)
        return joined

    def settled(self, settled: m.Settled) -> None:
        """Note what the reservation shrank to."""
        span = self._open.get((settled.epoch, settled.request_id))
        if span is not None:
            span.set_attribute("penstock.blocks.settled", settled.held_blocks)

    def released(self, released: m.Released, now_ns: int) -> None:
        """End the reservation's span."""
        span = self._open.pop((released.epoch, released.request_id), None)
        if span is not None:
            cause = "epoch_end" if released.cause is None else released.cause.name.lower()
            span.set_attribute("penstock.blocks.released", released.released_blocks)
            span.set_attribute("penstock.release.cause", cause)
            span.end(end_time=now_ns)

    def stopped(self, now_ns: int) -> None:
        """End the spans of what is still held, for its workers hold it on: the next scheduler knows of no trace."""
        for span in self._open.values():
            span.set_attribute("penstock.release.cause", "scheduler_stopped")
            span.end(end_time=now_ns)
        self._open.clear()


def _attributes(
    *, request_id: str, worker_id: str, channel: str, attempt: int, booked_blocks: int
) -> dict[str, Attribute]:
    """Return what both spans say of a reservation."""
    return {
        "penstock.request.id": request_id,
        "penstock.worker.id": worker_id,
        "penstock.channel": channel,
        "penstock.attempt": attempt,
        "penstock.blocks.booked": booked_blocks,
    }
