"""One batch on its way: a step for each status that is not an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.client import Client
from penstock.errors import NotFound, ServiceError
from services.gateway.batch.ending import Ending
from services.gateway.batch.errors import RefusedError
from services.gateway.batch.looks import Looks, ResultPage, page_of
from services.gateway.batch.output import BREATHE_EVERY, counted, is_line, is_output, size_of
from services.gateway.batch.reading import count_lines
from services.gateway.batch.records import ChangedError, Held, LeaseLostError
from services.gateway.batch.submitting import Submitting
from services.gateway.batch.turns import Reader, TooLateError, Turns
from services.gateway.core.batch import Batch, Counts, Event, Status
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from services.gateway.shelf import Shelf

BEAT_S = 0.25
"""Between two looks at whether the lease wants renewing."""

SAVE_S = 1.0
"""Between two writes of counts: what progress may be late by."""

UNWANTED = {Status.CANCELLING, Status.CANCELLED, Status.FAILED}
"""In which no line of a batch is wanted any more; one that expired has deadlines."""


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
        looks: Looks,
    ) -> None:
        """Drive what is `held`; read its input when it is its turn among `turns`, and its results by `looks`."""
        self._client = client
        self._shelf = shelf
        self._served = served
        self._metrics = metrics
        self._held = held
        self._turns = turns
        self._looks = looks
        self._submitting = Submitting(client, shelf, metrics, held)
        self._ending = Ending(client, shelf, turns)
        self._unsaved: tuple[Counts, int] | None = None
        """Counts and cursor that are not in the record yet."""

    @property
    def _batch(self) -> Batch:
        return self._held.batch

    async def run(self) -> None:
        """Return when the batch has ended. Raises LeaseLostError, and the client's errors."""
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
            except LeaseLostError:
                await self._withdraw()
                raise

    async def _withdraw(self) -> None:
        """End what this gateway, frozen for longer than its lease, submitted when another had ended what there was."""
        if (await self._held.found()).status in UNWANTED:
            await self._client.cancel(batch=self._batch.batch_id)

    async def _beat(self) -> None:
        """Renew the lease in time, and show how far the counting is."""
        saved_s = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            if self._unsaved is not None and time.monotonic() - saved_s >= SAVE_S:
                saved_s = time.monotonic()
                unsaved, self._unsaved = self._unsaved, None
                await self._count(*unsaved)
            await self._held.beat()

    async def _move(self, event: Event, batch: Batch | None = None) -> None:
        await self._held.save((batch or self._batch).moved(event, self._held.now_s()))

    # ---- validating ----

    async def _validate(self) -> None:
        """Read every line; nothing is submitted unless all are good. What is late ends, be it read or not."""
        try:
            async with self._turns.to_read(await self._reader()) as turn:
                total = await count_lines(self._shelf, self._batch, await self._served.names(), turn)
        except RefusedError as error:
            await self._fail(error)
            return
        except TooLateError:
            await self._end(Event.LATE, self._batch)
            return
        if self._held.late:
            await self._end(Event.LATE, replace(self._batch, counts=Counts(total)))
        else:
            await self._move(Event.VALID, replace(self._batch, counts=Counts(total)))

    async def _reader(self) -> Reader:
        """Return who waits for a turn; of an input that is gone or damaged it is known when it is read."""
        size_bytes = 0
        with suppress(NotFound, ServiceError):
            size_bytes = (await self._shelf.file(self._batch.input_file_id)).bytes
        return Reader(self._batch.tenant, size_bytes, lambda: self._batch.expires_at - self._held.now_s())

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
        """Submit when it is this batch's turn, and count meanwhile; nothing more once its time is over."""
        if self._held.late:  # nothing of the input is wanted any more, be it there or not
            await self._held.progress(submitted=True, cut=True)
            return
        try:
            await first_of(self._submit(), self._tally(follow=True))
        except TooLateError:
            await self._held.progress(submitted=True, cut=True)
        if self._unsaved is not None:
            await self._count(*self._unsaved)
            self._unsaved = None

    async def _submit(self) -> None:
        async with self._turns.to_submit(await self._reader()) as turn:
            await self._submitting.run(turn)

    async def _tally(self, follow: bool) -> None:
        """Count results until every request of the batch has ended; with `follow` for ever, while more are submitted.

        What is counted goes into the record now and then, by the beat; without `follow` all of it at the end.
        """
        counts, cursor = self._batch.counts, self._batch.progress.cursor
        with self._looks.pauses() as pauses:
            while True:
                async with self._looks.place:
                    page = await page_of(self._client, self._batch.batch_id, cursor)
                    counts, cursor = await self._tally_page(page, counts, cursor)
                if page.last and not (follow or page.under_way):
                    break
                if page.last:
                    await asyncio.sleep(next(pauses))
        self._unsaved = None
        await self._count(counts, cursor)

    async def _tally_page(self, page: ResultPage, counts: Counts, cursor: int) -> tuple[Counts, int]:
        """Return counts and cursor with what a page has."""
        for read, watched in enumerate(page.results, 1):
            cursor = watched.cursor
            if is_line(self._batch, watched.result):
                size_bytes = await size_of(watched.result, self._looks.writing)
                counts = counted(counts, watched.result, size_bytes)
                self._metrics.batch_lines.labels("completed" if is_output(watched.result) else "failed").inc()
            self._unsaved = (counts, cursor)
            if read % BREATHE_EVERY == 0:
                await asyncio.sleep(0)
        return counts, cursor

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
        turn = self._turns.to_read((await self._reader())._replace(left_s=lambda: None))
        await self._move(event, await self._ending.of(batch, event, self._held.now_s(), turn))


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
