"""What is said of batches that have ended when dead letters of theirs are requeued: looked up when it is asked for."""

from __future__ import annotations

from dataclasses import replace

from services.gateway.batch.output import Output
from services.gateway.batch.records import BatchRecords
from services.gateway.core.batch import UNCOUNTED, Batch, Status


class Reruns:
    """Brings the records of such batches up to date. A batch that ended without dead letters costs nothing."""

    def __init__(self, output: Output, records: BatchRecords) -> None:
        """Read what has ended anew through `output`."""
        self._output = output
        self._records = records

    async def now(self, batch: Batch, size: bool = False) -> Batch:
        """Return a batch as it is now, with `size` that of its error file as well, which takes reading it.

        While a requeued line is under way it has failed, and the size is not put: it changes again. Raises Problem if
        the turn of the batch's tenant does not come.
        """
        if not batch.ended or batch.status is Status.FAILED:
            return batch
        under_way = False
        if batch.counts.dead:
            async with self._output.counting.turn(batch.tenant):
                before, (batch, under_way) = batch, await self._output.reruns(batch)
            if batch.progress.cursor != before.progress.cursor:
                batch = await self._put(before, batch)
        if size and (under_way or batch.counts.error_bytes == UNCOUNTED):
            _, error_bytes = await self._output.size(batch, errors=True)
            sized = replace(batch, counts=replace(batch.counts, error_bytes=error_bytes))
            if not under_way:
                await self._put(batch, sized)
            batch = sized
        return batch

    async def _put(self, before: Batch, batch: Batch) -> Batch:
        """Put what was `before` as `batch`, with its files, unless it has been put otherwise meanwhile; return it."""
        output_id = batch.output_file_name if batch.counts.completed else batch.output_file_id
        error_id = batch.error_file_id if batch.counts.failed else None
        batch = replace(batch, output_file_id=output_id, error_file_id=error_id)

        def brought(last: Batch) -> Batch:
            if (last.counts, last.progress) != (before.counts, before.progress):
                return last  # by another gateway
            return replace(
                last, counts=batch.counts, progress=batch.progress, output_file_id=output_id, error_file_id=error_id
            )

        await self._output.resize(before, batch)
        return await self._records.change(batch.batch_id, brought)
