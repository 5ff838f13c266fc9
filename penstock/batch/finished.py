"""The output of a run that has ended: which run's it is, and the answers that only it still has."""

from __future__ import annotations

import asyncio
import json
import os
import re
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeAlias

from penstock.batch.journal import Journal
from penstock.batch.reader import Ask, InputFile, asks
from penstock.batch.runner import key_of
from penstock.client import Client
from penstock.errors import InvalidRequest, NotFound, PermissionDenied
from penstock.queue.v1 import queue_pb2 as pb

LOOKS = 16
"""Lines of an output by which its run is looked for, spread over it: the results of some may be gone. Then so many of
the first that are errors: what was retried has the youngest results."""

GOOD_ENDING = b'"error": null}'
"""How the line of a good answer ends."""

NAME = re.compile(rb'\s*\{\s*"id"\s*:\s*"vllm-([\w-]{1,128})"')
"""How a line begins: with the name of its request, or of its run and its number if there was none."""

BEGINNING_BYTES = 256
"""So much of a line is read for that."""

MOST_OF_A_LINE_BYTES = 64 * 1024 * 1024
"""Of a longer line the end is taken for another, for it may be none: what is at the place of an output may be any file.
An answer is that of a request of at most 16 MiB, mostly much shorter."""

WITHOUT_REQUEST = re.compile(r"(rb-[0-9a-f]{16}(?:-[0-9a-f]{16})?)-\d+")

ASKED_AT_ONCE = 32
"""Requests that the queue is asked for: it looks one up in a fraction of a millisecond."""

BREATHE_EVERY = 64
"""Lines looked at before other tasks get a turn: parsing a line takes about 0.1 ms."""

Absent: TypeAlias = Callable[[Sequence[int]], Awaitable[int]]
"""Returns of how many of these lines the queue has no request."""


class UnknownLinesError(Exception):
    """Of some lines nobody knows whether they failed."""

    def __init__(self, lines: int) -> None:
        """Say of how many."""
        super().__init__(lines)
        self.lines = lines


class Finished:
    """What is at the place of an output, before a run puts another there."""

    def __init__(self, path: Path) -> None:
        """Look at `path`, where there may be nothing, or a file that no run has written."""
        self._path = path

    async def batch(self, client: Client) -> str:
        """Return the batch whose answers it has, empty if neither it nor the queue can tell. Raises client errors."""
        asked = set[str]()
        for count, name in enumerate(self._names()):
            if count % BREATHE_EVERY == 0:
                await asyncio.sleep(0)
            if not name or name in asked:
                continue
            asked.add(name)
            if found := WITHOUT_REQUEST.fullmatch(name):
                return found[1]
            with suppress(NotFound, InvalidRequest, PermissionDenied):
                told = await client.wire_get(pb.GetRequest(request_id=name))
                if told.HasField("result"):
                    return told.result.batch
        return ""

    def lines(self) -> Iterator[bytes]:
        """Yield its lines; none if it cannot be read."""
        with suppress(OSError), self._path.open("rb") as file:
            yield from file

    def _names(self) -> Iterator[str]:
        """Yield names that tell, and an empty one for each line that tells none."""
        with suppress(OSError), self._path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            found = 0
            for look in range(LOOKS):
                file.seek(size_bytes * look // LOOKS)
                if look:
                    file.readline(MOST_OF_A_LINE_BYTES)
                name = _name_in(file.readline(BEGINNING_BYTES))
                found += bool(name)
                yield name
            file.seek(0)
            errors = 0
            # A file that has no such line there is no output, and may be of any size.
            while found and errors < LOOKS and (line := file.readline(MOST_OF_A_LINE_BYTES)):
                name = "" if line.rstrip().endswith(GOOD_ENDING) else _name_in(line)
                errors += bool(name)
                yield name


async def have_what_it_had(
    journal: Journal,
    source: InputFile,
    output: Finished | None,
    absent: Absent,
    passed: Callable[[int], None],
    under_way: int,
) -> None:
    """Have the journal note the good answers that neither it nor the queue has, from the `output` of the run.

    Calls `passed` with how many lines it has looked at. Raises UnknownLinesError if there are lines without an answer
    that nothing is known of: not that they were wrong or failed, as the output says, None if it is not there or another
    run's; nor that they are some of the requests which are `under_way`.
    """
    if journal.answered == len(source):
        return
    unknown = array("q")
    had = chain(output.lines() if output else (), repeat(b""))
    for count, (item, data) in enumerate(zip(asks(source, journal.is_answered), had, strict=False)):
        if count % BREATHE_EVERY == 0:
            await asyncio.sleep(0)
        passed(count + 1)
        if not isinstance(item, Ask):
            continue
        answer = _answer_in(data, item.custom_id)
        if answer is None:
            unknown.append(item.line)
        elif answer["error"] is None:
            journal.add(item.line, 0, answer)
    # Of those under way some may be retries, of lines whose errors are known.
    lines = len(unknown) if len(unknown) > under_way else await absent(unknown)
    if lines:
        raise UnknownLinesError(lines)


async def without_request(client: Client, batch: str, lines: Sequence[int]) -> int:
    """Return of how many of these lines the queue has no first request, waiting or ended. Raises client errors."""
    left, absent = iter(lines), 0

    async def ask() -> None:
        nonlocal absent
        for line in left:
            try:
                await client.wire_get(pb.GetRequest(idempotency_key=pb.IdempotencyKey(key=key_of(batch, line))))
            except NotFound:
                absent += 1

    await asyncio.gather(*(ask() for _ in range(min(ASKED_AT_ONCE, len(lines)))))
    return absent


def _name_in(line: bytes) -> str:
    found = NAME.match(line)
    return found[1].decode() if found else ""


def _answer_in(data: bytes, custom_id: str) -> dict[str, Any] | None:
    """Return the answer that a line of an output is, of the line with this custom_id; None if it is none."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    is_answer = isinstance(record, dict) and record.keys() >= {"id", "custom_id", "response", "error"}
    return record if is_answer and record["custom_id"] == custom_id else None
