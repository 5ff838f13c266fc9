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

    def granted(self, grant: m.Grant, now_ns: int, stood_ready: bool = False) -> str:
        """Record the wait, open the reservation's span, and return the wait's traceparent for the worker to join."""
        if not self._telemetry.enabled:
            return grant.traceparent
        attributes: dict[str, Attribute] = {
            "penstock.request.id": grant.request_id,
            "penstock.worker.id": grant.worker_id,
            "penstock.channel": grant.channel,
            "penstock.attempt": grant.attempt,
            "penstock.blocks.booked": grant.booked_blocks,
            **({"penstock.grant.standing": True} if stood_ready else {}),
        }
        traceparent = self._telemetry.record(
            "scheduler.grant", grant.traceparent, min(grant.announced_ns, now_ns), now_ns, attributes
        )
        span = self._telemetry.start("scheduler.credits", grant.traceparent, now_ns, attributes)
        self._open[grant.epoch, grant.request_id] = span
        return traceparent

    def met(self, met: m.Met, now_ns: int) -> None:
        """Open the span of a reservation that was there before its request, which waited for nothing."""
        request = met.request
        self.granted(
            m.Grant(
                met.epoch,
                met.worker_id,
                request.request_id,
                request.channel,
                met.booked_blocks,
                True,
                request.attempt,
                request.traceparent,
                now_ns,
            ),
            now_ns,
            stood_ready=True,
        )

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
