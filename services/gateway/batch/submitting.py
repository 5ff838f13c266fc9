"""A batch's lines on their way to the queue, a window at a time, with what the queue makes of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from penstock.batch.reader import LineError as WrongLine
from penstock.client import Client
from penstock.errors import OVER_QUOTA, NotFound
from penstock.request.v1 import request_pb2 as pb
from penstock.submitting import QUOTA_PAUSE_S
from services.gateway.batch.errors import RefusedError, described, lost_input, refused, with_refusals
from services.gateway.batch.lines import WINDOW_BYTES, WINDOW_LINES, RawLine, read_lines
from services.gateway.batch.output import BREATHE_EVERY
from services.gateway.batch.reading import MAX_ERRORS, understood
from services.gateway.batch.records import Held
from services.gateway.batch.turns import Turn
from services.gateway.core.batch import LineError, Refusal
from services.gateway.metrics import GatewayMetrics
from services.gateway.shelf import Shelf

MAX_REFUSALS = 1000
"""Lines that the queue may refuse before it is the batch that is wrong; they are kept in its record."""

MAX_ROW_BYTES = 768 * 1024
"""What a batch's record may grow to by them: the queue takes 1 MiB."""


class Submitting:
    """Submits what is left of the batch of one lease."""

    def __init__(self, client: Client, shelf: Shelf, metrics: GatewayMetrics, held: Held) -> None:
        """Submit the lines of what is `held`."""
        self._client = client
        self._shelf = shelf
        self._metrics = metrics
        self._held = held

    async def run(self, turn: Turn) -> None:
        """Submit line after line; stop when the time is over. Raises RefusedError or TooLateError."""
        in_time = True
        try:
            async with aclosing(self.windows()) as windows:
                async for window, last in windows:
                    in_time = not self._held.late and await self.send(window, turn)
                    if not in_time:
                        break
                    await self._held.progress(line=last.number, offset=last.end)
                    await turn.pass_on()
        except NotFound as error:
            raise RefusedError(lost_input(error)) from None
        await self._held.progress(submitted=True, cut=not in_time)

    async def windows(self) -> AsyncGenerator[tuple[list[pb.Request], RawLine], None]:
        """Yield the requests of some lines after those that were submitted, and the last of the lines.

        There is no request where a window's bytes of the file have no line, or none to submit.
        What the queue has refused stays refused: the queue may have been told otherwise since, and the line is told of.
        """
        batch = self._held.batch
        refused_lines = {one.line for one in batch.refusals}
        window: list[pb.Request] = []
        line, begins = batch.progress.line, batch.progress.offset
        last, size_bytes = RawLine(line, b"", begins), 0
        lines = read_lines(self._shelf, batch.input_file_id, line, begins)
        async with aclosing(lines):
            async for raw in lines:
                last = last if raw.is_mark else raw
                if last is raw and raw.number not in refused_lines:
                    window.append(await self._request(raw))
                    size_bytes += window[-1].ByteSize()
                    if len(window) % BREATHE_EVERY == 0:
                        await asyncio.sleep(0)
                if len(window) == WINDOW_LINES or max(size_bytes, raw.read_to - begins) >= WINDOW_BYTES:
                    yield window, last
                    window, size_bytes, begins = [], 0, raw.read_to
        if window:
            yield window, last

    async def send(self, window: list[pb.Request], turn: Turn) -> bool:
        """Submit a window, waiting for room if its tenant has a quota; others have the turn meanwhile.

        Return False if the batch's time was over before there was room for all of it; may raise TooLateError then.
        """
        # Raises LeaseLostError if another gateway has taken the batch, because this one was frozen.
        await self._held.beat()
        left = await self._send_once(window)
        while left and not self._held.late:
            await turn.pause(QUOTA_PAUSE_S)
            await self._held.beat()
            left = await self._send_once(left)
        return not left

    async def _request(self, raw: RawLine) -> pb.Request:
        try:
            return (await understood(raw, self._held.batch))[1]
        except WrongLine as error:
            raise RefusedError(described(error)) from None

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
        grown = with_refusals(self._held.batch, refusals)
        if len(grown.refusals) > MAX_REFUSALS or len(grown.to_row()) > MAX_ROW_BYTES:
            named = grown.refusals[:MAX_ERRORS]
            raise RefusedError(*(LineError(one.code, one.message, one.param, one.line) for one in named))
        await self._held.change(lambda batch: with_refusals(batch, refusals))
