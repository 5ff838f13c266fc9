"""Output and error files of a batch: written from its results while they are read, never stored."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

from penstock.client import Client
from penstock.errors import NotFound
from penstock.files.v1 import files_pb2
from penstock.openai.answers import Line, body_of, error_object, failure_of
from penstock.openai.jsontext import Rows, json_bytes
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.batch.errors import untold
from services.gateway.batch.lines import (
    MAX_LINES,
    PIECE_BYTES,
    WINDOW_BYTES,
    WINDOW_LINES,
    Numbers,
    Reference,
    custom_id_in,
    key_of,
    read_lines,
)
from services.gateway.batch.looks import EXPECTED_BYTES, PAGE_LINES, log_of, looked_up
from services.gateway.batch.records import KEPT_S
from services.gateway.batch.turns import Reader, Turn, Turns
from services.gateway.core.batch import UNCOUNTED, Batch, Counts, Refusal, Status
from services.gateway.pages import Paged, Pages
from services.gateway.reply import Writing
from services.gateway.shelf import Shelf

BREATHE_EVERY = 2
"""Lines written or read before other requests get their turn: a line takes up to 0.2 ms, and a request needs a dozen
turns until its first byte is out."""

LOOKED_AT = 64
"""Results looked at before other requests get their turn: half a millisecond."""

UNDONE = {
    pb.OUTCOME_EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    pb.OUTCOME_CANCELLED: ("batch_cancelled", "This request was not executed because the batch was cancelled."),
    pb.OUTCOME_UNSPECIFIED: ("requeued", "This request failed and was requeued; it has not ended again yet."),
}
"""Code and message of a line that was not answered because of its batch, or has no end for now."""

NO_RESULT = ("no_result", "This line has no result: another request has its idempotency key, or it was deleted.")
"""Code and message of a line that was submitted and cannot be answered for."""


def is_output(result: pb.Result) -> bool:
    """Whether a result is in the output file; else it is in the error file."""
    return result.outcome == pb.OUTCOME_COMPLETED


def is_line(batch: Batch, result: pb.Result) -> bool:
    """Whether a result is that of one of the batch's lines; else a client's, who submitted under the batch's name."""
    return line_number(batch, result) > 0


def line_number(batch: Batch, result: pb.Result) -> int:
    """Return which of the batch's lines a result is of; 0 if it is a client's."""
    try:
        line = Reference.from_text(result.client_reference).line
    except (ValueError, TypeError, RecursionError):
        return 0
    return line if isinstance(line, int) and result.idempotency_key == key_of(batch.batch_id, line) else 0


def line_of(result: pb.Result) -> Iterator[bytes]:
    """Return the parts of a result as a line of its file."""
    reference = Reference.from_text(result.client_reference)
    error = response = None
    if is_output(result):
        response = _response(result.request_id, 200, body_of(reference.shape, result, Rows))
    elif result.outcome in UNDONE:
        error = dict(zip(("code", "message"), UNDONE[result.outcome], strict=True))
    else:
        status, inner = failure_of(result, reference.shape)
        response = _response(result.request_id, status, {"error": inner})
    return _line(result.request_id, reference.custom_id, response, error)


def refusal_line(batch: Batch, refusal: Refusal) -> bytes:
    """Return the line of the error file for a line that the queue refused; there is no request to name."""
    inner = error_object(400, refusal.message, refusal.param or "", refusal.code)
    response = _response(None, 400, {"error": inner})
    return b"".join(_line(f"{batch.batch_id}-{refusal.line}", refusal.custom_id, response, None))


def _response(name: str | None, status: int, body: Line) -> Line:
    return {"status_code": status, "request_id": name, "body": body}


def _line(name: str, custom_id: str, response: Line | None, error: dict[str, str] | None) -> Iterator[bytes]:
    line = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
    yield from json_bytes(line, "backslashreplace")
    yield b"\n"


async def size_of(result: pb.Result, writing: Writing) -> int:
    """Return how many bytes the line of a result has."""
    return len(await writing.of(lambda: line_of(result), result.ByteSize()))


def counted(counts: Counts, result: pb.Result, size_bytes: int) -> Counts:
    """Return the counts with one more result, whose line has this size."""
    if is_output(result):
        return replace(counts, completed=counts.completed + 1, output_bytes=counts.output_bytes + size_bytes)
    return replace(
        counts,
        failed=counts.failed + 1,
        expired=counts.expired + (result.outcome == pb.OUTCOME_EXPIRED),
        dead=counts.dead + (result.outcome == pb.OUTCOME_DEAD),
        error_bytes=counts.error_bytes + size_bytes,
    )


def counted_again(counts: Counts, result: pb.Result, size_bytes: int) -> Counts:
    """Return the counts of a batch that has ended when a dead letter of it has ended again; its line has this size."""
    dead = max(0, counts.dead - 1) + (result.outcome == pb.OUTCOME_DEAD)
    if not is_output(result):
        return replace(counts, dead=dead, error_bytes=UNCOUNTED)
    failed = max(0, counts.failed - 1)
    return replace(
        counts,
        completed=counts.completed + 1,
        failed=failed,
        dead=dead,
        output_bytes=counts.output_bytes + size_bytes,
        error_bytes=UNCOUNTED if failed else 0,
    )


def _result_in(batch: Batch, key: str, found: queue_pb2.GetResponse) -> pb.Result | None:
    """Return a line's result; None if the line is blank, or its result deleted, or the key's is not a line's.

    That of a line which was requeued, and has not ended again, has no outcome.
    """
    if found.HasField("result"):
        result = found.result
    else:
        reference = found.client_reference
        result = pb.Result(request_id=found.request_id, idempotency_key=key, client_reference=reference)
    return result if is_line(batch, result) else None


async def put_view(shelf: Shelf, batch: Batch, file_id: str, kind: str, size_bytes: int) -> None:
    """Put the output or error file of a batch, or its size if it is there."""
    view = files_pb2.CreateFileRequest(
        file_id=file_id,
        view=batch.batch_id,
        filename=f"{batch.batch_id}_{kind}.jsonl",
        purpose="batch_output",
        bytes=size_bytes,
        # Without its batch nobody could read it.
        expires_after_ns=(batch.output_expires_after_s or KEPT_S) * 1_000_000_000,
    )
    await shelf.put_view(view)


class Output:
    """Writes the files of batches."""

    def __init__(self, client: Client, shelf: Shelf, turns: Turns | None = None, pages: Pages | None = None) -> None:
        """Read results through `client` and inputs from `shelf`, those for files in `turns`; None: its own.

        What is read is held among `pages`, or its own.
        """
        self._pages = pages or Pages()
        self._client = client
        self._shelf = shelf
        self._turns = turns or Turns()
        self.counting = self._pages.counting

    async def lines(
        self, batch: Batch, errors: bool, input_order: bool = False, whole: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the output file, or with `errors` those of the error file; a large one piece by piece.

        They come in the order in which they ended, or with `input_order` in that of the input; of the error file, those
        that were never submitted come last. With `whole`, raises Problem where those cannot be told any more.
        """
        told = 0
        results = self._in_input_order(batch) if input_order else self._in_completion_order(batch, errors)
        async with aclosing(results):
            async for page in results:
                if is_output(page.one) is not errors:
                    told += 1
                    async with aclosing(page.pieces(line_of, page.one.ByteSize())) as pieces:
                        async for piece in pieces:
                            yield piece
        if errors:
            for refusal in batch.refusals:
                yield refusal_line(batch, refusal)
            rest = self.unsubmitted(batch, batch.status is Status.EXPIRED, self._turn(batch))
            try:
                async with aclosing(rest):
                    async for line in rest:
                        told += 1
                        yield line
            except NotFound as error:
                if whole and told + len(batch.refusals) < batch.counts.failed:
                    raise untold(batch, error) from None

    async def size(self, batch: Batch, errors: bool) -> tuple[int, int]:
        """Return how many lines the file has, and how many bytes."""
        count = size_bytes = 0
        async with aclosing(self.lines(batch, errors)) as lines:
            async for piece in lines:
                count += piece.endswith(b"\n")
                size_bytes += len(piece)
        return count, size_bytes

    async def reruns(self, batch: Batch) -> tuple[Batch, bool]:
        """Return an ended batch with what of it has ended anew since, and whether anything of it is under way."""
        counts, cursor, under_way = batch.counts, batch.progress.cursor, 0
        async with aclosing(self._client.wire_ended(batch.batch_id, cursor)) as events:
            async for event in events:
                if event.HasField("progress"):
                    under_way = event.progress.waiting + event.progress.running
                elif event.HasField("result"):
                    cursor = event.result.cursor
                    if is_line(batch, event.result.result):
                        size_bytes = await size_of(event.result.result, self._pages.writing)
                        counts = counted_again(counts, event.result.result, size_bytes)
                await asyncio.sleep(0)
        return replace(batch, counts=counts, progress=replace(batch.progress, cursor=cursor)), under_way > 0

    async def resize(self, before: Batch, batch: Batch) -> None:
        """Put the sizes of a batch's files that have changed; there may not have been an output file."""
        was, now = before.counts, batch.counts
        if now.output_bytes != was.output_bytes:
            new = before.output_file_id is None
            await self._resize(batch, batch.output_file_name, "output", now.output_bytes, new)
        if now.error_bytes not in {UNCOUNTED, was.error_bytes}:
            await self._resize(batch, batch.error_file_name, "error", now.error_bytes, new=False)

    async def _resize(self, batch: Batch, file_id: str, kind: str, size_bytes: int, new: bool) -> None:
        with suppress(NotFound):  # it was deleted or has expired, and stays so
            if not new:
                await self._shelf.file(file_id)
            await put_view(self._shelf, batch, file_id, kind, size_bytes)

    async def _in_completion_order(self, batch: Batch, errors: bool) -> AsyncGenerator[Paged[pb.Result], None]:
        """Yield, of each of a batch's lines in the order in which they ended, the page that has its result.

        With `errors`, those of the error file are whole: a line whose dead letter was requeued before the log was read
        comes last. It is looked up because the log does not have it, whatever is said of what is under way: that was
        true before the log was read.
        """
        looks_back = errors and batch.counts.dead > 0
        seen, count, failed = Numbers(), 0, 0
        with Paged(self._pages, batch.tenant, log_of(self._client, batch.batch_id), EXPECTED_BYTES) as page:
            while await page.turn():
                count += 1
                if count % BREATHE_EVERY == 0:
                    await asyncio.sleep(0)
                line = line_number(batch, page.one)
                if not line:
                    continue
                if looks_back and not is_output(page.one):
                    if line in seen:
                        continue  # it was a dead letter when it was yielded, and has failed again since
                    failed += 1
                if looks_back:
                    seen.add(line)
                yield page
        if looks_back and failed < batch.counts.failed:
            seen.update(refusal.line for refusal in batch.refusals)
            for numbers in (await self._submitted(batch), batch.scattered):
                with self._looked_up(batch, array("I", (one for one in numbers if one not in seen))) as page:
                    while await page.turn():
                        yield page

    async def _in_input_order(self, batch: Batch) -> AsyncGenerator[Paged[pb.Result], None]:
        for numbers in (await self._submitted(batch), await self._after(batch)):
            with self._looked_up(batch, numbers) as page:
                while await page.turn():
                    yield page

    def _looked_up(self, batch: Batch, numbers: Sequence[int]) -> Paged[pb.Result]:
        """Return what has the results of these lines, one after the other."""
        read = looked_up(numbers, lambda some: self._results_of(batch, some))
        return Paged(self._pages, batch.tenant, read, EXPECTED_BYTES)

    async def _submitted(self, batch: Batch) -> Sequence[int]:
        """Return the lines up to where all were submitted, blank ones among them only where they are few.

        The queue would be asked for each of those: of an input with more lines than were counted, it is read which.
        """
        last = batch.progress.line
        if last <= batch.counts.total:
            return range(1, last + 1)
        found = array("I")
        turn = self._turn(batch)
        try:
            async with turn, aclosing(turn.lines(read_lines(self._shelf, batch.input_file_id))) as lines:
                async for raw in lines:
                    if raw.number > last:
                        break
                    found.append(raw.number)
        except NotFound:  # which of them are blank is not known any more
            return range(1, last + 1)
        return found

    async def _after(self, batch: Batch) -> Sequence[int]:
        """Return the lines of the last window that a quota may have let in, though not all of those before them.

        Of a batch that has ended it is known which it did.
        """
        done = batch.progress
        if batch.ended or batch.scattered or (done.submitted and not done.cut) or not batch.counts.total:
            return batch.scattered
        refused = {refusal.line for refusal in batch.refusals}
        found: list[int] = []
        turn = self._turn(batch)
        lines = read_lines(self._shelf, batch.input_file_id, done.line, done.offset)
        try:
            async with turn, aclosing(turn.lines(lines, done.offset)) as had:
                async for raw in had:
                    if raw.number in refused:
                        continue
                    found.append(raw.number)
                    if len(found) == WINDOW_LINES:
                        break
        except NotFound:  # which of them are blank is not known any more
            return range(done.line + 1, done.line + 1 + WINDOW_LINES + len(refused))
        return found

    def _turn(self, batch: Batch) -> Turn:
        """Return a turn for reading an input, however late it comes."""
        return self._turns.to_read(Reader(batch.tenant, 0, lambda: None))

    async def _results_of(self, batch: Batch, lines: Sequence[int]) -> list[pb.Result | None]:
        """Return the results of the first of these lines; see `_result_in`."""
        results: list[pb.Result | None] = []
        for count, (key, found) in enumerate(await self._found(batch, lines), 1):
            results.append(_result_in(batch, key, found))
            if count % LOOKED_AT == 0:
                await asyncio.sleep(0)
        return results

    async def _found(self, batch: Batch, lines: Sequence[int]) -> list[tuple[str, queue_pb2.GetResponse]]:
        """Return the keys of the first of these lines, and what the queue knows by them; it says how many there are."""
        keys = [key_of(batch.batch_id, line) for line in lines]
        answer = await self._client.wire_get_many(queue_pb2.GetManyRequest(keys=keys))
        return list(zip(keys, answer.requests, strict=False))

    async def unsubmitted(self, batch: Batch, late: bool, turn: Turn) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the error file for those of the input that were never submitted.

        Raises NotFound after those that could be read if the input is gone or damaged. `late` says that the batch's
        time was over. Of an input that was not read before that, no more are told than a batch may have.

        The `turn` is had while a window of them is read; while it is told nothing of the input is held.
        """
        if batch.progress.submitted and not batch.progress.cut:
            return
        code, message = UNDONE[pb.OUTCOME_EXPIRED if late else pb.OUTCOME_CANCELLED]
        left_out = {refusal.line for refusal in batch.refusals} | set(batch.scattered)
        line, offset, left = batch.progress.line, batch.progress.offset, MAX_LINES
        more, gone = True, None
        while more and left:
            async with turn:
                names, line, offset, more, gone = await self._named(batch, line, offset, left_out, left, turn)
            left -= len(names)
            for number, custom_id in names:
                name = f"{batch.batch_id}-{number}"
                yield b"".join(_line(name, custom_id, None, {"code": code, "message": message}))
        if gone is not None:
            raise gone

    async def _named(
        self, batch: Batch, line: int, offset: int, left_out: set[int], most: int, turn: Turn
    ) -> tuple[list[tuple[int, str]], int, int, bool, NotFound | None]:
        """Return number and custom_id of a window of up to `most` lines, the window's last line, where it ends, whether
        there may be more, and why no more could be read."""
        names: list[tuple[int, str]] = []
        begins = offset
        try:
            async with aclosing(read_lines(self._shelf, batch.input_file_id, line, offset)) as lines:
                async for raw in lines:
                    line, offset = raw.number, raw.end
                    await asyncio.sleep(0)
                    if not raw.is_mark and raw.number not in left_out:
                        names.append((raw.number, await custom_id_in(raw)))
                    if len(names) == min(WINDOW_LINES, most) or offset - begins >= WINDOW_BYTES:
                        return names, line, offset, True, None
                    if raw.begun_bytes:  # of a line that may be longer than a window
                        await turn.read(PIECE_BYTES)
        except NotFound as error:
            return names, line, offset, False, error
        return names, line, offset, False, None

    async def unanswered(self, batch: Batch, most: int, turn: Turn) -> list[Refusal]:
        """Return up to `most` of the lines that were submitted and have no result; none if the input is gone.

        They are read when the `turn` for it is had.
        """
        done, found = batch.progress, list[Refusal]()
        last = max([done.line, *batch.scattered])
        known = {refusal.line for refusal in batch.refusals}
        with suppress(NotFound):
            async with turn, aclosing(turn.lines(read_lines(self._shelf, batch.input_file_id))) as lines:
                async for raw in lines:
                    if raw.number > last:
                        break
                    was_submitted = raw.number <= done.line or raw.number in batch.scattered
                    if not was_submitted or raw.number in known:
                        continue
                    if await self._results_of(batch, [raw.number]) == [None]:
                        found.append(Refusal(raw.number, await custom_id_in(raw), *NO_RESULT))
                        if len(found) == most:
                            break
        return found

    async def scattered(self, batch: Batch) -> list[int]:
        """Return the lines behind those that were all submitted that were submitted too, as far as the queue knows."""
        found: list[int] = []
        numbers = await self._after(batch)
        told = 0
        while told < len(numbers):
            known = await self._found(batch, numbers[told : told + PAGE_LINES])
            found += [line for line, (_, one) in zip(numbers[told:], known, strict=False) if one.request_id]
            told += len(known)
        return found

    async def delete(self, batch: Batch, errors: bool) -> None:
        """Delete the results that one of the files is written from."""
        ids: list[str] = []
        async with aclosing(self._in_completion_order(batch, errors)) as results:
            async for page in results:
                if is_output(page.one) is not errors:
                    ids.append(page.one.request_id)
                if len(ids) == DELETE_AT_ONCE:
                    await self._client.delete(*ids)
                    ids = []
        if ids:
            await self._client.delete(*ids)


DELETE_AT_ONCE = 1000
"""Results deleted by one call."""
