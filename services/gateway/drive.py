"""One batch on its way: a step for each status that is not an end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Coroutine
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from penstock.batch.reader import Ask, CustomIds
from penstock.batch.reader import LineError as WrongLine
from penstock.client import Client
from penstock.errors import OVER_QUOTA, NotFound
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from penstock.submitting import QUOTA_PAUSE_S
from services.gateway.batch_errors import described, lost_input, refused, with_refusals
from services.gateway.batch_lines import (
    WINDOW_LINES,
    RawLine,
    ask_of,
    key_of,
    read_lines,
    request_of,
)
from services.gateway.batch_output import BREATHE_EVERY, Output, counted, is_line, is_output, put_view, refusal_line
from services.gateway.batch_records import ChangedError, Held, LostError
from services.gateway.core.batch import Batch, Counts, Event, LineError, Progress, Refusal, Status
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from services.gateway.shelf import Shelf
from services.gateway.turns import Turn, Turns

log = logging.getLogger(__name__)

MAX_LINES = 200_000
"""Of one batch: four times OpenAI's limit. Each takes some 150 bytes here while its batch is validated."""

MAX_ERRORS = 100
"""Wrong lines that are named; reading ends there."""

MAX_REFUSALS = 1000
"""Lines that the queue may refuse before it is the batch that is wrong; they are kept in its record."""

MAX_ROW_BYTES = 768 * 1024
"""What a batch's record may grow to by them: the queue takes 1 MiB."""

WINDOW_BYTES = 4 * 1024 * 1024
"""The same in bytes as WINDOW_LINES in lines."""

BEAT_S = 0.25
"""Between two looks at whether the lease wants renewing."""

SAVE_S = 1.0
"""Between two writes of counts: what progress may be late by."""

UNWANTED = {Status.CANCELLING, Status.CANCELLED, Status.FAILED}
"""In which no line of a batch is wanted any more; one that expired has deadlines."""


class RefusedError(Exception):
    """A line or the whole input cannot be asked."""

    def __init__(self, *errors: LineError) -> None:
        """Say why."""
        super().__init__()
        self.errors = list(errors)


class Drive:
    """Drives the batch of one lease."""

    def __init__(
        self,
        client: Client,
        shelf: Shelf,
        served: Served,
        metrics: GatewayMetrics,
        held: Held,
        turns: Turns,
    ) -> None:
        """Drive what is `held`; read its input when it is its turn among `turns`."""
        self._client = client
        self._shelf = shelf
        self._served = served
        self._metrics = metrics
        self._held = held
        self._turns = turns
        self._output = Output(client, shelf)
        self._unsaved: tuple[Counts, int] | None = None
        """Counts and cursor that are not in the record yet."""

    @property
    def _batch(self) -> Batch:
        return self._held.batch

    @property
    def _late(self) -> bool:
        return self._held.now_s() >= self._batch.expires_at

    async def run(self) -> None:
        """Return when the batch has ended. Raises LostError, and the client's errors."""
        steps = {
            Status.VALIDATING: self._validate,
            Status.IN_PROGRESS: self._go_on,
            Status.CANCELLING: self._cancel,
            Status.FINALIZING: self._finalize,
        }
        while not self._batch.ended:
            self._unsaved = None
            try:
                with suppress(ChangedError):
                    await first_of(steps[self._batch.status](), self._beat())
            except LostError:
                await self._withdraw()
                raise

    async def _withdraw(self) -> None:
        """End what this gateway, frozen for longer than its lease, submitted when another had ended what there was."""
        if (await self._held.found()).status in UNWANTED:
            await self._client.cancel(batch=self._batch.batch_id)

    async def _beat(self) -> None:
        """Renew the lease in time, and show how far the counting is."""
        saved_s = self._held.now_s()
        while True:
            await asyncio.sleep(BEAT_S)
            if self._unsaved is not None and self._held.now_s() - saved_s >= SAVE_S:
                saved_s = self._held.now_s()
                unsaved, self._unsaved = self._unsaved, None
                await self._count(*unsaved)
            await self._held.beat()

    async def _move(self, event: Event, batch: Batch | None = None) -> None:
        await self._held.save((batch or self._batch).moved(event, self._held.now_s()))

    # ---- validating ----

    async def _validate(self) -> None:
        """Read every line; nothing is submitted unless all are good."""
        try:
            async with self._turns.to_read():
                total = await self._count_lines()
        except RefusedError as error:
            await self._fail(error)
            return
        if self._late:
            await self._end(Event.LATE, replace(self._batch, counts=Counts(total)))
        else:
            await self._move(Event.VALID, replace(self._batch, counts=Counts(total)))

    async def _count_lines(self) -> int:
        models = await self._served.names()
        seen = CustomIds()
        errors: list[LineError] = []
        total = 0
        try:
            async with aclosing(read_lines(self._shelf, self._batch.input_file_id)) as lines:
                async for raw in lines:
                    total += 1
                    if total % BREATHE_EVERY == 0:
                        await asyncio.sleep(0)
                    if total > MAX_LINES:
                        raise RefusedError(LineError("too_many_lines", f"a batch has at most {MAX_LINES} lines"))
                    try:
                        ask, _ = self._understood(raw, models)
                        seen.check(ask.custom_id, raw.number)
                    except WrongLine as error:
                        errors.append(described(error))
                    if len(errors) == MAX_ERRORS:
                        break
        except NotFound as error:
            raise RefusedError(lost_input(error)) from None
        if errors:
            raise RefusedError(*errors)
        if not total:
            raise RefusedError(LineError("empty_file", "the input file has no lines", "input_file_id"))
        return total

    def _understood(self, raw: RawLine, models: Collection[str]) -> tuple[Ask, pb.Request]:
        """Return what a line asks for; raises LineError, also for what nobody foresaw: it would come again for ever."""
        try:
            ask = ask_of(raw, self._batch.endpoint, models)
            return ask, request_of(ask, self._batch)
        except WrongLine:
            raise
        except Exception:
            log.exception("%s: line %s cannot be understood", self._batch.batch_id, raw.number)
            text = f"line {raw.number}: the gateway failed; its log says why"
            raise WrongLine(raw.number, "internal_error", text) from None

    async def _fail(self, error: RefusedError) -> None:
        # Nobody is shown the refusals of a batch that failed; in its record the errors have their place.
        await self._move(Event.REFUSED, replace(self._batch, errors=error.errors, refusals=[]))

    # ---- in progress ----

    async def _go_on(self) -> None:
        """Submit what is left, then wait for the end of all that was submitted."""
        try:
            if not self._batch.progress.submitted:
                await self._submit_in_turn()
        except RefusedError as error:
            await self._client.cancel(batch=self._batch.batch_id)
            await self._fail(error)
            return
        await self._tally(follow=False)
        if self._batch.counts.expired or self._batch.progress.cut:
            await self._end(Event.LATE, self._batch)
        else:
            await self._move(Event.ENDED)

    async def _submit_in_turn(self) -> None:
        """Submit when it is this batch's turn, and count meanwhile; nothing more if its time is over before that."""
        if self._late:  # nothing of the input is wanted any more, be it there or not
            await self._progress(submitted=True, cut=True)
            return
        timeout = asyncio.timeout(self._batch.expires_at - self._held.now_s())
        try:
            async with timeout, self._turns.to_submit(self._batch.tenant) as turn:
                timeout.reschedule(None)
                await first_of(self._submit(turn), self._tally(follow=True))
        except TimeoutError:
            if not timeout.expired():
                raise
            await self._progress(submitted=True, cut=True)
        if self._unsaved is not None:
            await self._count(*self._unsaved)
            self._unsaved = None

    async def _submit(self, turn: Turn) -> None:
        """Submit line after line, a window at a time; stop when the time is over."""
        start = self._batch.progress
        in_time = True
        try:
            async with aclosing(self._windows(start)) as windows:
                async for window, last in windows:
                    in_time = not self._late and await self._send(window, turn)
                    if not in_time:
                        break
                    await self._reached(last)
        except NotFound as error:
            raise RefusedError(lost_input(error)) from None
        await self._progress(submitted=True, cut=not in_time)

    async def _progress(self, **fields: Any) -> None:
        """Put how far the batch is; what else changes it meanwhile stays."""
        await self._held.change(lambda batch: replace(batch, progress=replace(batch.progress, **fields)))

    async def _windows(self, start: Progress) -> AsyncGenerator[tuple[list[pb.Request], RawLine], None]:
        """Yield the requests of some lines after `start`, and the last of the lines.

        What the queue has refused stays refused: the queue may have been told otherwise since, and the line is told of.
        """
        refused_lines = {one.line for one in self._batch.refusals}
        window: list[pb.Request] = []
        size_bytes = 0
        lines = read_lines(self._shelf, self._batch.input_file_id, start.line, start.offset)
        async with aclosing(lines):
            async for raw in lines:
                if raw.number in refused_lines:
                    continue
                window.append(self._request(raw))
                size_bytes += window[-1].ByteSize()
                if len(window) % BREATHE_EVERY == 0:
                    await asyncio.sleep(0)
                if len(window) == WINDOW_LINES or size_bytes >= WINDOW_BYTES:
                    yield window, raw
                    window, size_bytes = [], 0
        if window:
            yield window, raw

    def _request(self, raw: RawLine) -> pb.Request:
        try:
            return self._understood(raw, ())[1]
        except WrongLine as error:
            raise RefusedError(described(error)) from None

    async def _send(self, window: list[pb.Request], turn: Turn) -> bool:
        """Submit a window, waiting for room if its tenant has a quota; others have the turn meanwhile.

        Return False if the batch's time was over before there was room for all of it.
        """
        await self._held.beat()  # raises LostError if another gateway has taken the batch, because this one was frozen
        left = await self._send_once(window)
        while left and not self._late:
            await turn.pause(QUOTA_PAUSE_S)
            await self._held.beat()
            left = await self._send_once(left)
        return not left

    async def _send_once(self, requests: list[pb.Request]) -> list[pb.Request]:
        """Submit requests; return those that a quota has no room for now."""
        taken = 0
        left: list[pb.Request] = []
        refusals: list[Refusal] = []
        async with aclosing(self._client.submit_many(requests)) as acks:
            async for ack in acks:
                if ack.error is None:
                    taken += 1
                    continue
                if ack.error.code == OVER_QUOTA:
                    left.append(requests[ack.index])
                else:
                    refusals.append(refused(ack.error, requests[ack.index]))
        if refusals:
            await self._refuse(refusals)
        self._metrics.batch_lines.labels("submitted").inc(taken)
        return left

    async def _refuse(self, refusals: list[Refusal]) -> None:
        """Note lines that the queue does not take; raises RefusedError when there are too many of them."""
        self._metrics.batch_lines.labels("failed").inc(len(refusals))
        grown = with_refusals(self._batch, refusals)
        if len(grown.refusals) > MAX_REFUSALS or len(grown.to_row()) > MAX_ROW_BYTES:
            named = grown.refusals[:MAX_ERRORS]
            raise RefusedError(*(LineError(one.code, one.message, one.param, one.line) for one in named))
        await self._held.change(lambda batch: with_refusals(batch, refusals))

    async def _reached(self, raw: RawLine) -> None:
        await self._progress(line=raw.number, offset=raw.end)

    async def _tally(self, follow: bool) -> None:
        """Count results until every request of the batch has ended; with `follow` for ever, while more are submitted.

        What is counted goes into the record now and then, by the beat; without `follow` all of it at the end.
        """
        counts, cursor = self._batch.counts, self._batch.progress.cursor
        read = 0
        async with aclosing(self._client.wire_results(self._batch.batch_id, cursor, follow)) as results:
            async for watched in results:
                cursor = watched.cursor
                if is_line(self._batch, watched.result):
                    counts = counted(counts, watched.result)
                    self._metrics.batch_lines.labels("completed" if is_output(watched.result) else "failed").inc()
                self._unsaved = (counts, cursor)
                read += 1
                if read % BREATHE_EVERY == 0:
                    await asyncio.sleep(0)
        self._unsaved = None
        await self._count(counts, cursor)

    async def _count(self, counts: Counts, cursor: int) -> None:
        def counted_in(batch: Batch) -> Batch:
            total = replace(counts, total=batch.counts.total)
            return replace(batch, counts=total, progress=replace(batch.progress, cursor=cursor))

        await self._held.change(counted_in)

    # ---- the ends ----

    async def _cancel(self) -> None:
        """End what was submitted, down to the engines, and count what had ended before."""
        await self._client.cancel(batch=self._batch.batch_id)
        await self._tally(follow=False)
        await self._end(Event.WRITTEN, self._batch)

    async def _finalize(self) -> None:
        await self._end(Event.WRITTEN, self._batch)

    async def _end(self, event: Event, batch: Batch) -> None:
        """Put the output and error files where they have lines, and end the batch with their names."""
        batch = replace(batch, progress=await self._settled(batch))
        batch = replace(batch, scattered=await self._output.scattered(batch))
        left_bytes = left = 0
        async with aclosing(self._output.unsubmitted(batch, late=event is Event.LATE)) as lines:
            async for line in lines:
                left_bytes += len(line)
                left += 1
        refusals = [refusal_line(batch, one) for one in batch.refusals]
        left_bytes += sum(len(line) for line in refusals)
        left += len(refusals)
        counts = batch.counts
        counts = replace(counts, failed=counts.failed + left, error_bytes=counts.error_bytes + left_bytes)
        if counts.completed + counts.failed > counts.total:
            # A dead letter that was requeued has ended twice; only its last end is in the files.
            failed, error_bytes = await self._output.size(batch.moved(event, self._held.now_s()), errors=True)
            counts = replace(counts, failed=failed, error_bytes=error_bytes)
        ended = replace(batch, counts=counts)
        if counts.completed:
            await self._put_view(ended, ended.output_file_name, "output", counts.output_bytes)
            ended = replace(ended, output_file_id=ended.output_file_name)
        if counts.failed:
            await self._put_view(ended, ended.error_file_name, "error", counts.error_bytes)
            ended = replace(ended, error_file_id=ended.error_file_name)
        await self._move(event, ended)

    async def _settled(self, batch: Batch) -> Progress:
        """Return how far the batch was submitted, with the part of a last window that was submitted before its end."""
        done = batch.progress
        if done.submitted and not done.cut:
            return done
        with suppress(NotFound):
            async with aclosing(read_lines(self._shelf, batch.input_file_id, done.line, done.offset)) as lines:
                async for raw in lines:
                    if raw.number in {one.line for one in batch.refusals}:
                        continue
                    key = queue_pb2.IdempotencyKey(key=key_of(batch.batch_id, raw.number))
                    await self._client.wire_get(queue_pb2.GetRequest(idempotency_key=key))
                    done = replace(done, line=raw.number, offset=raw.end)
        return done

    async def _put_view(self, batch: Batch, file_id: str, kind: str, size_bytes: int) -> None:
        await put_view(self._shelf, batch, file_id, kind, size_bytes)


async def first_of(working: Coroutine[Any, Any, None], beside: Coroutine[Any, Any, None]) -> None:
    """Run `working` to its end; cancel it and raise what `beside` raises, if that comes first."""
    tasks = [asyncio.create_task(working), asyncio.create_task(beside)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
