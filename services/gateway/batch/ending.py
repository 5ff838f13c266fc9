"""The end of a batch: its output and error files get their names, and its counts their last lines."""

from __future__ import annotations

from contextlib import aclosing, suppress
from dataclasses import replace

from penstock.client import Client
from penstock.errors import NotFound
from penstock.queue.v1 import queue_pb2
from services.gateway.batch.errors import with_refusals
from services.gateway.batch.lines import key_of, read_lines
from services.gateway.batch.output import Output, put_view, refusal_line
from services.gateway.batch.submitting import MAX_REFUSALS, MAX_ROW_BYTES
from services.gateway.batch.turns import Turn, Turns
from services.gateway.core.batch import Batch, Counts, Event, Progress, Refusal
from services.gateway.shelf import Shelf


class Ending:
    """Puts the files of batches that end."""

    def __init__(self, client: Client, shelf: Shelf, turns: Turns) -> None:
        """Ask the queue what it has of a batch; put files on the shelf. `turns` are for reading inputs."""
        self._client = client
        self._shelf = shelf
        self._output = Output(client, shelf, turns)

    async def of(self, batch: Batch, event: Event, now_s: float, turn: Turn) -> Batch:
        """Put the output and error files where they have lines; return the batch, about to end, with their names.

        The input is read when the `turn` for it is had.
        """
        batch = replace(batch, progress=await self._settled(batch, turn))
        batch = replace(batch, scattered=await self._output.scattered(batch))
        counts = await self._counts(batch, event, now_s, turn)
        if (missing := counts.total - counts.completed - counts.failed) > 0:
            batch = with_as_many(batch, await self._output.unanswered(batch, missing, turn))
            counts = await self._counts(batch, event, now_s, turn)
        ended = replace(batch, counts=counts)
        if counts.completed:
            await put_view(self._shelf, ended, ended.output_file_name, "output", counts.output_bytes)
            ended = replace(ended, output_file_id=ended.output_file_name)
        if counts.failed:
            await put_view(self._shelf, ended, ended.error_file_name, "error", counts.error_bytes)
            ended = replace(ended, error_file_id=ended.error_file_name)
        return ended

    async def _counts(self, batch: Batch, event: Event, now_s: float, turn: Turn) -> Counts:
        """Return its counts with the lines that have no result: not submitted, or refused by the queue."""
        left_bytes = left = 0
        with suppress(NotFound):  # the input: what there was of it is all that can be counted
            async with aclosing(self._output.unsubmitted(batch, event is Event.LATE, turn)) as lines:
                async for line in lines:
                    left_bytes += len(line)
                    left += 1
        refusals = [refusal_line(batch, one) for one in batch.refusals]
        left_bytes += sum(len(line) for line in refusals)
        left += len(refusals)
        counts = batch.counts
        counts = replace(counts, failed=counts.failed + left, error_bytes=counts.error_bytes + left_bytes)
        if not counts.total:  # it was over before its lines were counted, and none was submitted
            counts = replace(counts, total=left)
        if counts.completed + counts.failed > counts.total:
            # A dead letter that was requeued has ended twice; only its last end is in the files.
            failed, error_bytes = await self._output.size(batch.moved(event, now_s), errors=True)
            counts = replace(counts, failed=failed, error_bytes=error_bytes)
        return counts

    async def _settled(self, batch: Batch, turn: Turn) -> Progress:
        """Return how far the batch was submitted, with the part of a last window that was submitted before its end."""
        done = batch.progress
        if done.submitted and not done.cut:
            return done
        refused = {one.line for one in batch.refusals}
        lines = read_lines(self._shelf, batch.input_file_id, done.line, done.offset)
        with suppress(NotFound):
            async with turn, aclosing(turn.lines(lines, done.offset)) as had:
                async for raw in had:
                    if raw.number in refused:
                        continue
                    key = queue_pb2.IdempotencyKey(key=key_of(batch.batch_id, raw.number))
                    await self._client.wire_get(queue_pb2.GetRequest(idempotency_key=key))
                    done = replace(done, line=raw.number, offset=raw.end)
        return done


def with_as_many(batch: Batch, refusals: list[Refusal]) -> Batch:
    """Return the batch with more lines refused, or as many of them as its record has room for."""
    refusals = refusals[: max(0, MAX_REFUSALS - len(batch.refusals))]
    while refusals and len(with_refusals(batch, refusals).to_row()) > MAX_ROW_BYTES:
        refusals = refusals[: len(refusals) // 2]
    return with_refusals(batch, refusals)
