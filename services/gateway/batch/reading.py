"""A batch's input, line by line: all of it is understood before any of it is submitted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import aclosing

from penstock.batch.reader import Ask, CustomIds, compression
from penstock.batch.reader import LineError as WrongLine
from penstock.errors import NotFound
from penstock.request.v1 import request_pb2 as pb
from services.gateway.batch.errors import RefusedError, described, lost_input
from services.gateway.batch.lines import MAX_LINES, RawLine, ask_of, read_lines, request_of
from services.gateway.batch.output import BREATHE_EVERY
from services.gateway.batch.turns import Turn
from services.gateway.core.batch import Batch, LineError
from services.gateway.pace import give_way
from services.gateway.shelf import Shelf

log = logging.getLogger(__name__)

MAX_ERRORS = 100
"""Wrong lines that are named; reading ends there."""


async def count_lines(shelf: Shelf, batch: Batch, models: Collection[str], turn: Turn) -> int:
    """Return how many lines the input has, read in a `turn` that was had; others have it after each window.

    Raises RefusedError unless all of them can be asked of these models, and TooLateError.
    """
    seen = CustomIds()
    errors: list[LineError] = []
    total = 0
    try:
        async with aclosing(turn.lines(read_lines(shelf, batch.input_file_id))) as lines:
            async for raw in lines:
                total += 1
                if total % BREATHE_EVERY == 0:
                    await asyncio.sleep(0)
                if total > MAX_LINES:
                    raise RefusedError(LineError("too_many_lines", f"a batch has at most {MAX_LINES} lines"))
                if raw.number == 1 and (how := compression(raw.data or b"")):
                    text = f"the input file is compressed ({how}); unpack it and upload what is in it"
                    raise RefusedError(LineError("compressed_file", text, "input_file_id"))
                try:
                    ask, _ = await understood(raw, batch, models)
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


async def understood(raw: RawLine, batch: Batch, models: Collection[str] = ()) -> tuple[Ask, pb.Request]:
    """Return what a line asks for, and give way to others if it is large.

    Raises LineError, also for what nobody foresaw: it would come again for ever.
    """
    since_s = time.monotonic()
    try:
        ask = ask_of(raw, batch.endpoint, models)
        return ask, request_of(ask, batch)
    except WrongLine:
        raise
    except Exception:
        log.exception("%s: line %s cannot be understood", batch.batch_id, raw.number)
        text = f"line {raw.number}: the gateway failed; its log says why"
        raise WrongLine(raw.number, "internal_error", text) from None
    finally:
        await give_way(len(raw.data or b""), since_s)
