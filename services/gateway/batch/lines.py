"""Input lines of a batch: cut out of the file as it is read, checked, and turned into requests of the queue."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from penstock.batch.reader import LINE_LIMIT_BYTES, Ask, LineError, custom_id_of, is_blank, parse_line, pieces
from penstock.errors import InvalidRequest, NotFound
from penstock.limits import MAX_REQUEST_BYTES
from penstock.openai.convert import to_request
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb
from services.gateway.core.batch import Batch
from services.gateway.pace import give_way
from services.gateway.shelf import Shelf, UnreadableError

log = logging.getLogger(__name__)

MAX_CUSTOM_ID_BYTES = 512
"""It travels with its request and is kept in the queue's memory while that lives."""

MAX_LINES = 200_000
"""Of one batch: four times OpenAI's limit. Each takes some 150 bytes here while its batch is validated."""

WINDOW_LINES = 1000
"""Lines submitted between two writes of how far a batch is: what a crash submits again in vain, and what is held. It is
also what is read of a batch before others have their turn."""

WINDOW_BYTES = 4 * 1024 * 1024
"""The same in bytes."""

PIECE_BYTES = 64 * 1024
"""Of a file, cut into lines before other requests get their turn: some 0.2 ms if there is no line to be seen in it."""

BLOCK_NUMBERS = 1024
"""Line numbers whose bits are kept together."""


class InputDamagedError(NotFound):
    """The input file is there, but its lines are as lost as those of one that is not."""


class RawLine(NamedTuple):
    """One line of the file; or a mark of how far it was read where no line is to be seen for long."""

    number: int
    """From 1, blank ones counted; of a mark, that of the last line before it."""
    data: bytes | None
    """None if it is too long to be read; nothing if it is a mark."""
    end: int
    """Where the next line begins."""
    begun_bytes: int = 0
    """Of a mark: what was read of that next line."""

    @property
    def is_mark(self) -> bool:
        """Whether it is no line."""
        return self.data == b""

    @property
    def read_to(self) -> int:
        """How much of the file was read, in bytes."""
        return self.end + self.begun_bytes


class Numbers:
    """A set of line numbers that takes a bit for each where they are close together, as those of a batch are."""

    def __init__(self) -> None:
        """There are none."""
        self._blocks: dict[int, int] = {}

    def add(self, number: int) -> None:
        """Put one more in."""
        block, at = divmod(number, BLOCK_NUMBERS)
        self._blocks[block] = self._blocks.get(block, 0) | 1 << at

    def update(self, numbers: Iterable[int]) -> None:
        """Put more in."""
        for number in numbers:
            self.add(number)

    def __contains__(self, number: int) -> bool:
        """Whether it was put in."""
        block, at = divmod(number, BLOCK_NUMBERS)
        return bool(self._blocks.get(block, 0) >> at & 1)


class LineSplitter:
    """Cuts lines out of a content that comes in parts; holds one line, and never more than the longest allowed."""

    def __init__(self, line: int = 0, offset: int = 0) -> None:
        """Go on after line number `line`, which ends at `offset`."""
        self._line = line
        self._offset = offset
        self._held = bytearray()
        self._skipped_bytes = 0

    def feed(self, data: bytes) -> Iterator[RawLine]:
        """Yield the lines that end in `data`, of at most the bytes of the longest line; blank ones are left out."""
        for blank_lines, blank_bytes, piece, ends in pieces(data, self._begun_bytes > 0):
            self._line += blank_lines
            self._offset += blank_bytes
            self._hold(piece)
            if ends:
                yield from self._cut(1)

    def mark(self) -> RawLine:
        """Return how far the content was read."""
        return RawLine(self._line, b"", self._offset, self._begun_bytes)

    def finish(self) -> Iterator[RawLine]:
        """Yield the last line if it does not end with a line break."""
        if self._begun_bytes:
            yield from self._cut(0)

    @property
    def _begun_bytes(self) -> int:
        return len(self._held) + self._skipped_bytes

    def _hold(self, piece: bytes) -> None:
        if self._skipped_bytes or len(self._held) + len(piece) > LINE_LIMIT_BYTES:
            self._skipped_bytes = self._begun_bytes + len(piece)
            self._held.clear()
        else:
            self._held += piece

    def _cut(self, break_bytes: int) -> Iterator[RawLine]:
        self._line += 1
        start = self._offset
        self._offset += self._begun_bytes + break_bytes
        if self._skipped_bytes:
            yield RawLine(self._line, None, self._offset)
        elif not is_blank(self._held, start):
            yield RawLine(self._line, bytes(self._held), self._offset)
        self._held.clear()
        self._skipped_bytes = 0


async def read_lines(shelf: Shelf, file_id: str, line: int = 0, offset: int = 0) -> AsyncGenerator[RawLine, None]:
    """Yield the lines of a file after number `line`, which ends at `offset`, and give way to others now and then.

    Where no line ends in a piece of the file, a mark is yielded: reading takes time there too, and can go on from it.

    Raises NotFound if the file is gone, and InputDamagedError if it cannot be read any more.
    """
    splitter = LineSplitter(line, offset)
    try:
        async with aclosing(shelf.content(file_id, offset)) as parts:
            async for part in parts:
                for start in range(0, len(part), PIECE_BYTES):
                    await asyncio.sleep(0)
                    ended = False
                    for raw in splitter.feed(part[start : start + PIECE_BYTES]):
                        ended = True
                        yield raw
                    if not ended:
                        yield splitter.mark()
    except UnreadableError as error:
        raise InputDamagedError(str(error)) from None
    for raw in splitter.finish():
        yield raw


@dataclass(frozen=True, slots=True)
class Reference:
    """What travels with a line's request, so that its answer can be written by someone who never saw the line."""

    line: int
    custom_id: str
    shape: Shape

    def to_text(self) -> str:
        """Return it as the text of a `client_reference`; the shape first, where `Shape.from_reference` reads it."""
        return f"{self.shape.to_reference()}\n{json.dumps([self.line, self.custom_id])}"

    @classmethod
    def from_text(cls, text: str) -> Reference:
        """Read what `to_text` wrote."""
        line, custom_id = json.loads(text.partition("\n")[2])
        return cls(line, custom_id, Shape.from_reference(text))


def ask_of(raw: RawLine, endpoint: str, models: Collection[str]) -> Ask:
    """Return the checked line. Raises LineError. `models` are those served; none means that this is not known."""
    if raw.data is None:
        limit = LINE_LIMIT_BYTES // 2**20
        raise LineError(raw.number, "line_too_long", f"line {raw.number} has more than {limit} MiB")
    ask = parse_line(raw.data, raw.number)
    if ask.url != endpoint:
        text = f"url: {ask.url} is not the batch's endpoint, {endpoint}"
        raise LineError(raw.number, "mismatched_endpoint", text, "url", ask.custom_id)
    size = len(ask.custom_id.encode())
    if size > MAX_CUSTOM_ID_BYTES:
        text = f"custom_id: {size} bytes; at most {MAX_CUSTOM_ID_BYTES} are allowed"
        raise LineError(raw.number, "invalid_field", text, "custom_id")
    model = ask.body.model
    if model and models and model not in models:
        served = ", ".join(sorted(models))
        text = f"body.model: {model[:200]!r} is not served here (served: {served})"
        raise LineError(raw.number, "model_not_found", text, "body.model", ask.custom_id)
    return ask


def request_of(ask: Ask, batch: Batch) -> pb.Request:
    """Return the request of a good line: named after batch and line, so that submitting it again changes nothing.

    Raises LineError if it cannot be asked after all.
    """
    try:
        request = to_request(ask.body)
    except InvalidRequest as error:
        param = f"body.{error.param}" if error.param else "body"
        raise LineError(ask.line, error.code, str(error), param, ask.custom_id) from None
    request.batch = batch.batch_id
    request.channel = batch.channel
    request.idempotency_key = key_of(batch.batch_id, ask.line)
    request.client_reference = Reference(ask.line, ask.custom_id, Shape.of(ask.body)).to_text()
    request.deadline_unix_ns = batch.expires_at * 1_000_000_000
    if batch.priority is not None:
        request.priority = batch.priority
    size = request.ByteSize()
    if size > MAX_REQUEST_BYTES:
        text = f"body: the request has {size} bytes; the limit is {MAX_REQUEST_BYTES // 2**20} MiB"
        raise LineError(ask.line, "request_too_large", text, "body", ask.custom_id)
    return request


def key_of(batch_id: str, line: int) -> str:
    """Return the idempotency key of a line's request."""
    return f"{batch_id}:{line}"


async def custom_id_in(raw: RawLine) -> str:
    """Return the custom_id of a line that nobody checked, empty if it has none; give way to others if it is large."""
    since_s = time.monotonic()
    try:
        custom_id = custom_id_of(raw.data or b"", raw.number)
    except LineError:  # of an input that was not read before its batch was over
        return ""
    except Exception:  # a defect: it would come again for ever, and keep the batch from its end
        log.exception("line %s cannot be understood: its custom_id is left out", raw.number)
        return ""
    finally:
        await give_way(len(raw.data or b""), since_s)
    return custom_id if len(custom_id.encode()) <= MAX_CUSTOM_ID_BYTES else ""
