"""Runs a batch file: submits what has no answer, watches, journals every answer as it comes.

Safe to kill at any point. Every line has the same idempotency key in every
run, so lines that are submitted again run once; the journal's cursor says
where to go on watching, so that no answer is read twice or missed. The key of
a line that failed and is run again is made of the request that failed, so that
this too is the same in every run.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from penstock.batch.answers import answer, error_line
from penstock.batch.journal import Journal
from penstock.batch.reader import AGAIN, Ask, InputFile, LineError, Passed, asks
from penstock.batch.summary import Tally
from penstock.client import Client
from penstock.errors import InvalidRequest, NotFound, ServiceError, refusal_of
from penstock.limits import MAX_REQUEST_BYTES
from penstock.openai.convert import to_request
from penstock.openai.shape import Shape
from penstock.openai.spelling import as_spelt
from penstock.request.v1 import request_pb2 as pb
from penstock.results import Submitted

BREATHE_EVERY = 64
"""Lines parsed before other tasks get a turn: parsing a line takes about 0.1 ms."""

LOOK_EVERY_S = 30.0
"""Between two questions whether anything of the batch is left, while no result comes: one costs a millisecond."""


class Observer(Protocol):
    """Is told how the run goes."""

    def progressed(self, answered: int, tally: Tally) -> None:
        """`answered` lines of the file have their answer."""

    def not_read(self, names: Sequence[str], line: int) -> None:
        """Line number `line` has these fields, which mean nothing; called for every line that has some."""

    def waits(self, why: str) -> None:
        """The queue takes no more lines now; called again and again while that lasts."""

    def passed(self, lines: int) -> None:
        """Of the file so many `lines` were looked at again; called for every line that has its answer already."""


Complete: TypeAlias = Callable[[int], Awaitable[None]]
"""Has the journal note what else there are of good answers, told how many requests have not ended; raises if a line is
left of which it is not known that it failed."""

LookAgain: TypeAlias = Callable[[Collection[str]], Awaitable[Collection[str] | None]]
"""Returns the models that the fleet answers to, None if not known, when it is asked for some that it did not."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with each line."""

    batch: str
    channel: str
    default_model: str
    served_models: Collection[str] | None
    """Models the fleet answers to; None if not known."""
    retry_failed: bool = False
    """Whether lines whose answers are errors by now are run again."""
    look_again: LookAgain | None = None
    """Asked before lines are refused for their models, once the others are submitted; None asks nobody."""
    look_every_s: float = LOOK_EVERY_S
    """How long no result comes before the queue is asked whether there will be any."""
    complete: Complete | None = None
    """Called with `retry_failed` once the queue's results are noted; None where lines may be left that never ran."""


def not_served(model: str, served: Collection[str]) -> str:
    """Return what is said of a model that nobody serves where the fleet answers to `served`."""
    return f"the model {model!r} is not served here (served: {', '.join(sorted(served))})"


def batch_name(output: Path, source: InputFile, model: str) -> str:
    """Return the batch's name: the same for the same output, by whichever path, input content and model."""
    return _name(os.path.join(os.path.realpath(output.parent), output.name), source, model)


def former_name(output: Path, source: InputFile, model: str) -> str:
    """Return the batch's name in journals of former versions: another one for each path of the same output."""
    return _name(str(output.absolute()), source, model)


def fresh_name(key: str) -> str:
    """Draw the name of a batch that is begun afresh, by which `is_run_of` knows it again."""
    return f"{key}-{secrets.token_hex(8)}"


def is_run_of(batch: str, key: str) -> bool:
    """Whether a batch answers what the batch with the name `key` answers: it is that one, or was begun afresh."""
    return batch == key or batch.startswith(f"{key}-")


def key_of(batch: str, line: int) -> str:
    """Return the idempotency key of the first request of a line; each retry adds the one that failed."""
    return f"{batch}:{line}"


def _name(output: str, source: InputFile, model: str) -> str:
    text = "\0".join([output, source.sha256, model, ""])
    # A path may have bytes that are not UTF-8, each of them half a surrogate pair here.
    return "rb-" + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class BatchRun:
    """One run of one file."""

    def __init__(self, client: Client, source: InputFile, journal: Journal, plan: Plan, observer: Observer) -> None:
        """Prepare; the journal is open and has its header."""
        self._client = client
        self._source = source
        self._journal = journal
        self._plan = plan
        self._served = plan.served_models
        self._observer = observer
        self._submitted_lines = array("q")
        self._lines_of: dict[str, array[int]] = {}
        """Those of them that name a model, by it."""
        self._answered_of: dict[str, int] = {}
        """How many of the first of these are known to have their answers."""
        self._granted = 0
        """Requests counted in the tally that a worker was given."""
        self._finished = asyncio.Event()
        self._watched = 0
        """Cursor of the last result that came."""
        self._failed: dict[int, str] = {}
        """By line, the last request that the queue had of it when the run began, where that one failed."""
        self._errors: dict[int, bytes | None] = {}
        """By line with an error of this run, what the tally has of it: what counts of a result, None if it is wrong.

        Of a result the bytes: there may be as many as lines, and a message takes ten times the room.
        """
        self.tally = Tally(answered_earlier=journal.answered)
        self.late = 0
        """Once every line has its answer, how many requests have not ended whose lines have errors."""
        self.has_submitted = False
        """Whether the queue has taken a line, so that its answer is to be waited for."""

    async def run(self) -> None:
        """Return once every line has its answer in the journal.

        Raises the client's errors; the journal is then as far as the run got.
        """
        begun_earlier = under_way = 0
        if self._plan.retry_failed or not self._done or self._journal.errors:
            begun_earlier = under_way = await self._catch_up()
        self.tally.failed_earlier = self._journal.errors
        if not self._done:
            await self._ask()
            if self._journal.errors:
                under_way = await self._ended(self._watched, self._answered)
        self.late = under_way if self._journal.errors else 0
        self.tally.granted_here = max(0, self._granted - begun_earlier)

    async def _ask(self) -> None:
        """Submit and watch until every line has an answer."""
        submitting = asyncio.create_task(self._submit())
        watching = asyncio.create_task(self._watch())
        looking = asyncio.create_task(self._look_for_the_rest(submitting))
        finished = asyncio.create_task(self._finished.wait())
        tasks: set[asyncio.Task[object]] = {submitting, watching, looking, finished}
        pending = tasks
        try:
            while not finished.done():
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        finally:
            # All of them: what ended together with the one that failed may have failed too, which is no news then.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def unserved(self, served: Collection[str]) -> dict[str, int]:
        """Return the models not among `served` that lines without an answer wait for, with the first line of each."""
        found = {}
        for model in self._lines_of.keys() - served:
            lines, at = self._lines_of[model], self._answered_of.get(model, 0)
            while at < len(lines) and self._journal.is_answered(lines[at]):
                at += 1
            self._answered_of[model] = at
            if at < len(lines):
                found[model] = lines[at]
        return found

    async def _catch_up(self) -> int:
        """Note the results that the queue has by now: of a line that was run again the last one counts.

        Returns how many requests of the batch still waited or ran then.

        With `retry_failed` then take those back that are errors. All results are read for that, also those that the
        journal has: what fails is told by its request, and a line that nobody could send has none. Raises what the
        plan's `complete` raises.
        """
        under_way = await self._ended(0 if self._plan.retry_failed else self._journal.cursor, self._had)
        if self._plan.retry_failed:
            if self._plan.complete is not None:
                await self._plan.complete(under_way)
            self._journal.take_errors_back()
        self.tally.answered_earlier = self._journal.answered
        return under_way

    async def _ended(self, cursor: int, note: Callable[[int, pb.Result], None]) -> int:
        """Have the results noted that the queue has now after `cursor`; return how many requests have not ended."""
        under_way = 0
        async with aclosing(self._client.wire_ended(self._plan.batch, cursor)) as events:
            async for event in events:
                if event.HasField("result"):
                    note(event.result.cursor, event.result.result)
                else:
                    under_way = event.progress.waiting + event.progress.running
        return under_way

    def _had(self, cursor: int, result: pb.Result) -> None:
        """Note a result of before this run."""
        line = self._line_of(result)
        if line is None:
            return
        self._failed.pop(line, None)
        if result.outcome != pb.OUTCOME_COMPLETED:
            self._failed[line] = result.request_id
        with suppress(LineError):  # which is told when its line is read again
            ask = self._source.ask(line)
            self._journal.add(line, cursor, answer(ask.custom_id, line, ask.body, result))
            self.tally.answered_earlier = self._journal.answered
            self._observer.progressed(self._journal.answered, self.tally)

    def _line_of(self, result: pb.Result) -> int | None:
        """Return the line that a result may answer; None if it has its answer, or there is none."""
        line = int(result.client_reference) if result.client_reference.isdecimal() else 0
        return None if self._source.position(line) is None or self._journal.is_settled(line) else line

    @property
    def _done(self) -> bool:
        return self._journal.answered == len(self._source)

    async def _submit(self) -> None:
        submitted = self._client.submit_many(self._requests(), wait_for_quota=True, waits=self._observer.waits)
        async with aclosing(submitted) as acks:
            async for ack in acks:
                if ack.error is not None:
                    self._refused(self._submitted_lines[ack.index], ack)
                else:
                    self.has_submitted = True

    async def _requests(self) -> AsyncIterator[pb.Request]:
        """Yield the request of every line without an answer; wrong lines are answered here.

        Lines for models that nobody serves come last: a worker may come while the others are read.
        """
        put_aside, models = array("q"), set[str]()
        for count, item in enumerate(asks(self._source, self._journal.is_answered)):
            if count % BREATHE_EVERY == 0:
                await asyncio.sleep(0)
            if not isinstance(item, LineError) and item.not_read:
                self._observer.not_read(item.not_read, item.line)
            if isinstance(item, Passed) or self._journal.is_answered(item.line):
                self._observer.passed(count + 1)
            elif isinstance(item, Ask) and not self._serves(model := self._model_of(item)):
                put_aside.append(item.line)
                models.add(model)
            elif (request := self._request_or_note(item)) is not None:
                yield request
        async for request in self._set_aside(put_aside, models):
            yield request

    async def _set_aside(self, lines: Sequence[int], models: set[str]) -> AsyncIterator[pb.Request]:
        """Ask once more who serves these models, and yield the requests of their lines."""
        if lines and self._plan.look_again is not None:
            self._served = await self._plan.look_again(models)
        for count, line in enumerate(lines):
            if count % BREATHE_EVERY == 0:
                await asyncio.sleep(0)
            if self._journal.is_answered(line):  # by an earlier run, whose answers came meanwhile
                continue
            if (request := self._request_or_note(self._source.ask(line))) is not None:
                yield request

    def _model_of(self, ask: Ask) -> str:
        return ask.body.model or self._plan.default_model

    def _serves(self, model: str) -> bool:
        """Whether a worker answers to `model`, as far as that is known; to no name any one does."""
        return not model or self._served is None or model in self._served

    def _request_or_note(self, item: Ask | LineError) -> pb.Request | None:
        """Return the request of a line that is submitted next; note the answer of one that cannot be."""
        try:
            if isinstance(item, LineError):
                raise item
            request = self._request(item)
        except LineError as error:
            self._wrong(error)
            return None
        self._submitted_lines.append(item.line)
        if request.model:
            self._lines_of.setdefault(request.model, array("q")).append(item.line)
        return request

    def _request(self, ask: Ask) -> pb.Request:
        """Return the request of a good line. Raises LineError if it cannot be asked after all."""
        model = self._model_of(ask)
        if not self._serves(model):
            message = not_served(model, self._served or ())
            raise LineError(ask.line, "model_not_found", message, "body.model", ask.custom_id)
        try:
            request = to_request(ask.body)
        except InvalidRequest as error:
            param = f"body.{error.param}" if error.param else "body"
            raise LineError(ask.line, error.code, str(error), param, ask.custom_id) from None
        request.model = model
        request.batch = self._plan.batch
        request.channel = self._plan.channel
        request.idempotency_key = key_of(self._plan.batch, ask.line)
        if self._plan.retry_failed and ask.line in self._failed:
            request.idempotency_key += f":{self._failed[ask.line]}"
        request.client_reference = str(ask.line)
        if request.ByteSize() > MAX_REQUEST_BYTES:
            limit = MAX_REQUEST_BYTES // 2**20
            message = f"the request has {request.ByteSize()} bytes; the limit is {limit} MiB"
            raise LineError(ask.line, "request_too_large", message, "body", ask.custom_id)
        return request

    async def _watch(self) -> None:
        self._watched = cursor = self._journal.cursor
        async with aclosing(self._client.wire_results(self._plan.batch, cursor, joined=self._check_store)) as results:
            async for watched in results:
                self._watched = watched.cursor
                self._answered(watched.cursor, watched.result)

    async def _look_for_the_rest(self, submitting: asyncio.Task[None]) -> None:
        """Raise NotFound once all is submitted and the queue has neither a request nor a result that could still come.

        It says so twice, and nothing comes in between: of a run that was stopped for long, results that the queue has
        deleted since may still be on their way.
        """
        await asyncio.wait([submitting])
        said = False
        while True:
            watched = self._watched
            await asyncio.sleep(self._plan.look_every_s)
            over = watched == self._watched and await self._has_ended()
            if over and said and watched == self._watched:
                missing = len(self._source) - self._journal.answered
                raise NotFound(
                    f"the queue has no result any more of {missing} of {len(self._source)} lines: it was deleted, by "
                    f"somebody or for its age, before it was read; {AGAIN} runs these lines again"
                )
            said = over

    async def _has_ended(self) -> bool:
        """Whether nothing of the batch waits or runs, and there is no result that has not come."""
        ended = False
        async with aclosing(self._client.wire_ended(self._plan.batch, self._watched)) as events:
            async for event in events:
                if event.HasField("result"):
                    return False
                ended = not event.progress.waiting + event.progress.running
        return ended

    async def _check_store(self) -> None:
        """Raise ServiceError if the queue has another store than the one that the lines are submitted to."""
        header = self._journal.header
        store_id = (await self._client.stats()).store_id
        if header is not None and store_id != header.store_id:
            raise ServiceError(
                f"the queue has begun anew with another store ({store_id}, not {header.store_id}), which has none of "
                f"the lines; {AGAIN} submits to it what has no answer"
            )

    def _answered(self, cursor: int, result: pb.Result) -> None:
        """Note a result of this run: its cursor is above all that there were when the run began, which `_had` notes.

        A line may have one in the place of an error: it, or its request, was run again.
        """
        line = self._line_of(result)
        if line is None:
            return
        try:
            ask = self._source.ask(line)
        except LineError as error:
            # An earlier version of this command took the line and submitted it.
            if not self._journal.is_answered(line):
                self._wrong(error)
            return
        if self._journal.is_answered(line):
            self._take_back(line)
        self._count(result, 1)
        if result.outcome != pb.OUTCOME_COMPLETED:
            counts = pb.Result(outcome=result.outcome, usage=result.usage, timings=result.timings)
            self._errors[line] = counts.SerializeToString()
        self._note(line, cursor, answer(ask.custom_id, line, ask.body, result))

    def _count(self, result: pb.Result, times: int) -> None:
        self.tally.add(result, times)
        if result.timings.delivered_unix_ns:
            self._granted += times

    def _take_back(self, line: int) -> None:
        """Take off the tally what it has of a line whose answer is an error that is being replaced."""
        if line not in self._errors:
            self.tally.answered_earlier -= 1
            self.tally.failed_earlier -= 1
        elif (counts := self._errors.pop(line)) is not None:
            self._count(pb.Result.FromString(counts), -1)
        else:
            self.tally.bad_lines -= 1

    def _refused(self, line: int, ack: Submitted) -> None:
        """Answer a line that the queue refused; what is wrong with every line ends the run."""
        error = ack.error
        if error is None or self._journal.is_answered(line):
            return
        if error.param == "channel":
            raise refusal_of(error.code, error.message, error.param)
        ask = self._source.ask(line)
        message, param = as_spelt(error.message, error.param, Shape.of(ask.body).spellings)
        self._wrong(LineError(line, error.code, message, f"body.{param}" if param else "body", ask.custom_id))

    def _wrong(self, error: LineError) -> None:
        self.tally.bad_lines += 1
        self._errors[error.line] = None
        name = f"{self._plan.batch}-{error.line}"
        out = error_line(name, error.custom_id, error.line, error.code, str(error), error.param)
        self._note(error.line, 0, out)

    def _note(self, line: int, cursor: int, out: dict[str, object]) -> None:
        self._journal.add(line, cursor, out)
        self._observer.progressed(self._journal.answered, self.tally)
        if self._done:
            self._finished.set()
