"""Admission by predicted peak: fill the cache, and hardly ever let the engine preempt.

`max_tokens` says little about how long an output will be. This policy learns
lengths from what ends (`lengths`), sums what the requests of a worker will need
over the steps to come (`forecast`), and grants whatever keeps that sum, with a
margin, below the capacity. The margin is steered by the preemptions that happen
(`margin`). Reservations hold what the engine holds, and grow block by block.

With nothing learned, outputs are guessed to be of any size up to their limit, and those
that run correct the guess before the first has ended. Engine truth bounds it as it bounds every policy:
no booking exceeds what both ledger and engine have free by more than a round trip needs (`AHEAD_SHARE`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from services.scheduler.core.admission.estimate import peak_blocks, prompt_bound_tokens, worst_case_blocks
from services.scheduler.core.admission.forecast import NO_DEMAND, UNIT, Demand, Forecast, Size
from services.scheduler.core.admission.lead import Lead
from services.scheduler.core.admission.lengths import Kind, Lengths, bin_of, limit_tokens, prompt_class
from services.scheduler.core.admission.margin import DEFAULT_TARGET_PER_1000, Margin
from services.scheduler.core.admission.policy import Outlook, Policy
from services.scheduler.core.admission.prompts import PromptSizes
from services.scheduler.core.fleet import Group, Worker
from services.scheduler.core.messages import (
    Announced,
    CompletionAck,
    EngineReport,
    EngineShape,
    ReleaseCause,
    TokenizerAck,
)

RESERVE_OUTPUT_TOKENS: Final = 2
"""A reservation grows this many tokens before its next block is needed: the ACK takes less than two steps. More
would keep blocks from being granted that nobody uses yet."""

AHEAD_SHARE: Final = 1 / 16
"""Part of a worker's pool that may be granted before it is free: credits for the round trip, as a link needs them to be
kept full (Kung, Blackwell and Chapman, "Credit-Based Flow Control for ATM Networks", SIGCOMM '94).

A block is on its way between the step in which its request ends and the one in which the next request takes it: the
completion ACK, the grant, claim and prompt, the tokenizer, the next step. That is three steps or so of an engine in
which one of some fifty requests ends in every other step: 3 % of its blocks, and as many where prompts are not counted
yet. The forecast, whose first look is a quarter of a block's worth of steps ahead, says whether they will be free by
then; the engine's watermark holds back a request for which they are not."""


MOST_FIRST_LOOKS: Final = 1 << 14
"""First looks kept until the next ACK makes them out of date: more than a pass looks at, few enough for memory."""


class Flight:
    """One reservation as its worker's forecast has it, which counts its `demand` until it is gone.

    `request` is None if only a worker's inventory told of it.

    `booked_ns` is when it was granted, None once its first ACK has come or if it was not granted to be run at once.
    `bins` counts the bins of output length that its life table has been told it has reached, `exposed_bins` those
    and the ones it may end in before its next ACK.
    """

    __slots__ = ("bins", "booked_ns", "demand", "exposed_bins", "kind", "request", "size")

    def __init__(
        self,
        kind: Kind,
        size: Size,
        demand: Demand,
        request: Announced | None = None,
        booked_ns: int | None = None,
    ) -> None:
        """Begin with a request whose life table has been told nothing."""
        self.kind = kind
        self.size = size
        self.demand = demand
        self.request = request
        self.booked_ns = booked_ns
        self.bins = 0
        self.exposed_bins = 0


class FirstLook:
    """What a request that has generated nothing is taken for."""

    __slots__ = ("demand", "kind", "size")

    def __init__(self, size: Size, kind: Kind, demand: Demand) -> None:
        """Take what is expected of a request of this kind and size."""
        self.size = size
        self.kind = kind
        self.demand = demand


@dataclass(slots=True)
class View:
    """One worker's flights, their summed forecast, its margin, and how far away it is."""

    forecast: Forecast
    margin: Margin
    lead: Lead = field(default_factory=Lead)
    flights: dict[str, Flight] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    """By channel what its flights will hold, each at its fullest; in the forecast's units."""

    def add(self, flight: Flight) -> None:
        """Count what is expected of the flight."""
        self.forecast.add(flight.demand)
        channel = flight.kind.channel
        self.expected[channel] = self.expected.get(channel, 0) + flight.demand.peak

    def remove(self, flight: Flight) -> None:
        """Count no more what was expected of the flight."""
        self.forecast.remove(flight.demand)
        channel = flight.kind.channel
        left = self.expected.get(channel, 0) - flight.demand.peak
        if left:
            self.expected[channel] = left
        else:
            self.expected.pop(channel, None)


class Predictive(Policy):
    """Books the prompt and grows; admits while the predicted peak fits. A line and a share for each channel."""

    name: ClassVar[str] = "predictive"
    channels_apart: ClassVar[bool] = True
    reserve_output_tokens: ClassVar[int] = RESERVE_OUTPUT_TOKENS
    ahead_share: ClassVar[float] = AHEAD_SHARE

    def __init__(self, target_preemptions_per_1000: float = DEFAULT_TARGET_PER_1000) -> None:
        """Steer every worker towards this many preemptions for 1,000 completed requests."""
        self._target = target_preemptions_per_1000
        self._lengths = Lengths()
        self._prompts = PromptSizes()
        self._views: dict[int, View] = {}
        self._first_looks: dict[tuple[str, int, Group], FirstLook] = {}

    def fresh(self) -> Predictive:
        """Return the policy with nothing learned."""
        return Predictive(self._target)

    # ---- numbers ----

    def booking_blocks(self, request: Announced, shape: EngineShape) -> int:
        """Return the blocks of the prompt, as far as it can be told, and of the first output tokens."""
        size = self._first_size(request, shape, request.model)
        return min(size.held_blocks, worst_case_blocks(request, shape))

    def room_blocks(self, request: Announced, worker: Worker, blocks: int, due: bool = False) -> int:
        """Return the smaller of what is free and what the predicted peak leaves; an idle worker is all room.

        Who is `due` needs no margin: what others may still take was counted as if they held it.
        """
        view = self._views[worker.epoch]
        if not len(worker.ledger):
            return worker.usable_blocks
        if view.margin.recovering or worker.usable_blocks < blocks:
            return min(worker.usable_blocks, blocks - 1)
        demand = self._first_look(request, worker, blocks).demand
        deviations = min(view.margin.deviations, 0.0) if due else view.margin.deviations
        return min(worker.usable_blocks, blocks + view.forecast.spare_blocks(demand, deviations))

    def peak_blocks(self, request: Announced, worker: Worker, blocks: int) -> int:
        """Return the expected demand at its fullest, at least what is booked and at most all there is."""
        peak = -(-self._first_look(request, worker, blocks).demand.peak // UNIT)
        return min(max(blocks, peak), max(worker.shape.capacity_blocks, blocks))

    def expected_of(self, worker: Worker, channel: str) -> int:
        """Return the expected demand of the channel's requests, each at its fullest, at least what they hold."""
        expected = self._views[worker.epoch].expected.get(channel, 0)
        return max(-(-expected // UNIT), worker.ledger.held_by(channel))

    def expected_blocks(self, request: Announced, worker: Worker) -> int:
        """Return the expected demand at its fullest, at least what is booked."""
        blocks = self.booking_blocks(request, worker.group.shape)
        return max(blocks, -(-self._first_look(request, worker, blocks).demand.peak // UNIT))

    def outlook(self, worker: Worker) -> Outlook | None:
        """Return the predicted peak and the margin of the worker."""
        view = self._views[worker.epoch]
        margin = view.margin
        peak = view.forecast.peak_blocks(margin.deviations)
        return Outlook(peak, margin.deviations, margin.recovering, margin.cost.requests, margin.target_preemptions)

    def _first_size(self, request: Announced, shape: EngineShape, model: str) -> Size:
        """Return the size of a request that has generated nothing."""
        prompt = self._prompts.predict(model, request, prompt_bound_tokens(request, shape))
        limit = limit_tokens(request, shape, prompt)
        blocks = peak_blocks(prompt, min(RESERVE_OUTPUT_TOKENS, limit), request, shape)
        return Size(blocks, prompt, 0, limit, max(request.n, 1))

    def _first_look(self, request: Announced, worker: Worker, blocks: int) -> FirstLook:
        """Return what the request is expected to need, found once for all workers of a group until more is learned."""
        key = request.request_id, blocks, worker.group
        look = self._first_looks.get(key)
        if look is None:
            first = self._first_size(request, worker.shape, request.model)
            size = Size(blocks, first.prompt_tokens, 0, first.limit, first.completions)
            kind = Kind(worker.models[0], request.channel, prompt_class(size.prompt_tokens))
            demand = self._views[worker.epoch].forecast.demand(size, self._lengths.curve(kind))
            if len(self._first_looks) >= MOST_FIRST_LOOKS:
                self._first_looks.clear()  # engines that say nothing for long
            look = self._first_looks[key] = FirstLook(size, kind, demand)
        return look

    # ---- what becomes of the requests ----

    def opened(self, worker: Worker) -> None:
        """Begin a worker's forecast; of what it brings along only the blocks are known until the next ACK."""
        view = self._views[worker.epoch] = View(Forecast(worker.shape), Margin(self._target))
        for request_id in worker.ledger:
            reservation = worker.ledger.reservation(request_id)
            if reservation is not None:
                size = Size(reservation.held_blocks, 0, 0, worker.shape.max_model_len, reservation.sequences)
                kind = Kind(worker.models[0], reservation.channel, 0)
                flight = view.flights[request_id] = Flight(kind, size, NO_DEMAND)
                self._expect(view, flight)

    def ended(self, worker: Worker) -> None:
        """Forget the worker's forecast; what ran there runs no more, and how long it would have been stays unknown."""
        view = self._views.pop(worker.epoch, None)
        if view is not None:
            for flight in view.flights.values():
                self._expose(flight, 0)

    def booked(self, worker: Worker, request: Announced, blocks: int, now_ns: int | None) -> None:
        """Add a request that has generated nothing."""
        look = self._first_look(request, worker, blocks)
        view = self._views[worker.epoch]
        flight = view.flights[request.request_id] = Flight(look.kind, look.size, look.demand, request, now_ns)
        view.add(flight)

    def met(self, worker: Worker, grant: str, request: Announced, blocks: int) -> None:
        """Expect of a standing grant what its request is expected to need."""
        view = self._views[worker.epoch]
        flight = view.flights.pop(grant, None)
        if flight is not None:
            self._expose(flight, 0)
            view.remove(flight)
        self.booked(worker, request, blocks, None)

    def settled(self, worker: Worker, ack: TokenizerAck, now_ns: int) -> None:
        """Take the prompt's length, or how far a running request has come."""
        self._first_looks.clear()
        view = self._views[worker.epoch]
        flight = view.flights.get(ack.request_id)
        if flight is None:
            return
        if flight.booked_ns is not None:
            view.lead.answered(now_ns - flight.booked_ns)
            flight.booked_ns = None
        completions = flight.size.completions
        limit = ack.output_limit_tokens // completions or flight.size.limit
        generated = min(ack.generated_tokens // completions, max(limit - 1, 0))
        flight.size = Size(ack.held_blocks, ack.prompt_tokens, generated, limit, completions)
        if not flight.bins:
            known = prompt_class(ack.prompt_tokens)
            if known != flight.kind.prompt_class:
                flight.kind = Kind(flight.kind.model, flight.kind.channel, known)
            if flight.request is not None:
                self.lessons += self._prompts.observe(flight.request.model, flight.request, ack.prompt_tokens)
        self._reach(flight, bin_of(generated + 1) + 1)
        self._expose(flight, bin_of(self._covered_tokens(flight.size, worker.shape)) + 1)
        self._expect(view, flight)

    @staticmethod
    def _covered_tokens(size: Size, shape: EngineShape) -> int:
        """Return the output tokens of one completion that fit into what is held: after so many the next ACK comes."""
        held_blocks = size.held_blocks // size.completions
        if shape.most_blocks and held_blocks >= shape.most_blocks:
            return max(size.limit, size.generated + 1)
        covered = held_blocks * shape.block_size + 1 - shape.lookahead_tokens - size.prompt_tokens
        return max(min(covered, size.limit), size.generated + 1)

    def released(self, worker: Worker, ack: CompletionAck) -> None:
        """Take the request out, and learn from how far it came.

        An output as long as its limit may have been cut, and one that was stopped was: they count as having come so
        far, not as ends.
        """
        self._first_looks.clear()
        view = self._views[worker.epoch]
        flight = view.flights.pop(ack.request_id, None)
        if flight is None:
            return
        view.remove(flight)
        if not flight.bins:
            return
        if ack.cause is ReleaseCause.COMPLETED:
            spread = view.forecast.deviation_share(view.margin.deviations)
            view.margin.completed(flight.size.prompt_tokens + ack.output_tokens, spread)
        tokens = ack.output_tokens // flight.size.completions
        if ack.cause is ReleaseCause.COMPLETED and 0 < tokens < flight.size.limit:
            self._reach(flight, bin_of(tokens) + 1)
            self._lengths.ended(flight.kind, tokens)
        else:
            self._reach(flight, bin_of(tokens))
            self._lengths.cut()

    def reported(self, worker: Worker, report: EngineReport) -> bool:
        """Steer the margin; there is room again when the engine has recovered."""
        view = self._views[worker.epoch]
        view.lead.observe(report)
        view.forecast.look_from(view.lead.steps)
        ledger = worker.ledger
        view.forecast.share(ledger.shared_blocks, ledger.held_blocks, ledger.sequences)
        margin = view.margin
        recovering = margin.recovering
        margin.observe(report)
        return recovering and not margin.recovering

    def _reach(self, flight: Flight, bins: int) -> None:
        """Tell the life table of the bins that the flight has reached since it was last told, and expose it to none."""
        self._expose(flight, 0)
        self._lengths.reached(flight.kind, flight.bins, bins - 1)
        flight.bins = max(flight.bins, bins)

    def _expose(self, flight: Flight, bins: int) -> None:
        """Tell the life table up to which bin the flight may end before it is heard of again; 0 takes it out."""
        self._lengths.exposed(flight.kind, flight.bins, flight.exposed_bins - 1, -1)
        self._lengths.exposed(flight.kind, flight.bins, bins - 1, 1)
        flight.exposed_bins = bins

    def _expect(self, view: View, flight: Flight) -> None:
        """Have the forecast count what is expected of the flight now."""
        view.remove(flight)
        flight.demand = view.forecast.demand(flight.size, self._lengths.curve(flight.kind))
        view.add(flight)
