"""`penstock run-batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from penstock.batch.journal import (
    Header,
    Journal,
    JournalError,
    JournalWriteError,
    WriteStoppedError,
    journal_path,
    write_output,
    writing_path,
)
from penstock.batch.reader import InputFile, InputReadError
from penstock.batch.runner import BatchRun, Plan, batch_name
from penstock.batch.summary import EngineTotals, Summary, summarize, totals_of
from penstock.cli.calls import HOW_TO_START, QueueOption, SchedulerOption, call
from penstock.cli.config import ConfigOption, take_config
from penstock.cli.errors import CommandError
from penstock.cli.interrupt import Interrupted
from penstock.cli.progress import Progress
from penstock.cli.stack import Stack, StackPlan, running_stack
from penstock.cli.up import DEFAULT_DATA_DIR, flags_for_the_engine
from penstock.client import Client
from penstock.connection import Patience
from penstock.errors import InvalidRequest, NobodyAnswers, PenstockError, PermissionDenied, Unavailable
from penstock.exits import EX_CANNOT_WRITE, EX_INTERRUPTED, EX_NO_INPUT, EX_UNAVAILABLE, EX_USAGE

WORKERS_MEET_SCHEDULER_S = 15.0
"""How long workers that are ready may take to appear at the scheduler."""

SUMMARY_TRIES_S = 2.0
"""How long the scheduler is asked for its totals; a run does not fail for want of them."""

Say: TypeAlias = Callable[[str], None]
"""Prints a line beside the progress bar."""


WHY_AFTER_S = 5.0
"""A run that has taken so long may be waiting for a model that nobody serves."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was told."""

    source: Path
    target: Path
    queue: str
    scheduler: str
    channel: str
    model: str
    fresh: bool
    wait_s: float
    summary_json: Path | None
    stack: StackPlan | None


def run_batch(
    context: typer.Context,
    input_file: Annotated[Path, typer.Option("-i", "--input-file", help="Requests, one JSON object a line.")],
    output_file: Annotated[Path, typer.Option("-o", "--output-file", help="Answers, in input order.")],
    model: Annotated[
        str, typer.Option(help="With --up: the model to serve. Without: the model of lines that name none.")
    ] = "",
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
    scheduler: SchedulerOption = DEFAULT_SCHEDULER_ADDRESS,
    channel: Annotated[str, typer.Option(help="Channel the requests wait in.")] = "batch",
    start: Annotated[bool, typer.Option("--up", help="Start the services for this run, stop them after it.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="With --up: number of workers.")] = 1,
    data_dir: Annotated[Path, typer.Option(help="With --up: queue data, logs and the tiny model.")] = DEFAULT_DATA_DIR,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run every line again; forget earlier answers.")] = False,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the services, and workers of all models.")
    ] = 0.0,
    summary_json: Annotated[Path | None, typer.Option(help="Write the summary to this file as well.")] = None,
    config: ConfigOption = None,
) -> None:
    """Answer a file of requests in the OpenAI batch format. Killed half-way, the same command goes on where it was.

    With --up, unknown flags go to the workers' engine. Exit status 0 means that every line has its answer.
    """
    flags = flags_for_the_engine(context)
    if flags and not start:
        raise CommandError(f"no such option: {flags[0]} (engine flags need --up)", EX_USAGE)
    for name, flag in (("workers", "--workers"), ("data_dir", "--data-dir")):
        given = context.get_parameter_source(name)
        if not start and given is not None and given.name == "COMMANDLINE":
            raise CommandError(f"{flag} needs --up", EX_USAGE)
    _refuse_what_is_not_utf_8({"--channel": channel} if start else {"--channel": channel, "--model": model})
    told = take_config(config)
    stack = StackPlan(data_dir, workers, model, flags, base_port=0, told=told) if start else None
    target = _target(output_file)
    options = Options(input_file, target, queue, scheduler, channel, model, fresh, wait_s, summary_json, stack)
    _keep_what_is_needed(options)
    try:
        source = InputFile(input_file)
    except OSError as error:
        raise CommandError(f"cannot read {input_file}: {error.strerror}", EX_NO_INPUT) from None
    try:
        _with_journal(options, source)
    finally:
        source.close()


def _refuse_what_is_not_utf_8(options: Mapping[str, str]) -> None:
    """Raise CommandError if one of `options`, by their flags, cannot be said in a request."""
    for flag, text in options.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CommandError(f"{flag}: must be UTF-8", EX_USAGE) from None


def _target(output: Path) -> Path:
    """Return the file that gets the answers: `output`, or where it leads, for a link is to stay one.

    Raises CommandError if there can be no such file or none of the files beside it, which are put in its place.
    """
    _refuse_what_is_no_file(output)
    for path in _passed(output):
        # A file that the shell has opened lies behind these names: it would be replaced, and what it holds be gone.
        if path.startswith(("/dev/", "/proc/")) and not path.startswith("/dev/shm/"):
            raise CommandError(f"cannot write {output}: it is no regular file", EX_CANNOT_WRITE)
    target = output.resolve() if output.is_symlink() else output
    directory = target.absolute().parent
    if not directory.is_dir():
        raise CommandError(f"{output}: there is no directory {directory}", EX_CANNOT_WRITE)
    _refuse_what_is_no_file(journal_path(target))
    _refuse_what_is_no_file(writing_path(target))
    return target


def _passed(output: Path) -> Iterator[str]:
    """Yield the name of an output file and of each that it leads to, link by link; there is no circle of them.

    Each as it is said and as it is without links in its directory: a link may lead to /dev/fd.
    """
    path = os.path.abspath(output)
    while True:
        directory, name = os.path.split(path)
        directory = os.path.realpath(directory)
        yield path
        yield os.path.join(directory, name)
        if not os.path.islink(path):
            return
        path = os.path.normpath(os.path.join(directory, os.readlink(path)))


def _refuse_what_is_no_file(path: Path) -> None:
    """Raise CommandError if there is something at `path`, links followed, that is no regular file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}", EX_CANNOT_WRITE) from None
    if not stat.S_ISREG(found.st_mode):
        raise CommandError(f"cannot write {path}: it is no regular file", EX_CANNOT_WRITE)


def _keep_what_is_needed(options: Options) -> None:
    """Raise CommandError if a file that the run writes is the input, or the summary another one or no file.

    By whatever name or link: the input is there to be compared, what is written may not be yet.
    """
    written: dict[str, Path] = {
        "the output file": options.target,
        "the journal of the output file": journal_path(options.target),
        "the output file while it is written": writing_path(options.target),
    }
    if (summary := options.summary_json) is not None:
        for what, path in written.items():
            if os.path.realpath(summary) == os.path.realpath(path):
                raise CommandError(f"the summary file {summary} is {what} as well; one would be lost", EX_USAGE)
        try:
            unfit = summary.is_dir() or not summary.absolute().parent.is_dir()
        except OSError as error:  # of a name that is too long, of a directory that one may not enter
            raise CommandError(f"cannot write {summary}: {error.strerror}", EX_CANNOT_WRITE) from None
        if unfit:
            raise CommandError(f"cannot write {summary}: no file can be there", EX_CANNOT_WRITE)
        written["the summary file"] = summary
    for what, path in written.items():
        with suppress(OSError):
            if path.samefile(options.source):
                message = f"the input file {options.source} is {what} as well ({path}) and would be lost"
                raise CommandError(message, EX_USAGE)


def _with_journal(options: Options, source: InputFile) -> None:
    path = journal_path(options.target)
    try:
        journal = Journal(path, source, options.fresh, options.target)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}", EX_CANNOT_WRITE) from None
    except JournalError as error:
        raise CommandError(str(error), EX_USAGE) from None
    try:
        call(_run(options, source, journal))
    except Interrupted:
        raise CommandError(_interrupted(options, source, journal), EX_INTERRUPTED) from None
    except InputReadError as error:
        raise CommandError(str(error), EX_NO_INPUT) from None
    except JournalError as error:
        status = EX_CANNOT_WRITE if isinstance(error, JournalWriteError) else EX_USAGE
        raise CommandError(str(error), status) from None
    finally:
        if journal.is_empty:
            journal.remove()
        journal.close()


async def _run(options: Options, source: InputFile, journal: Journal) -> None:
    async with AsyncExitStack() as resources:
        progress = resources.enter_context(Progress(len(source)))
        stack: Stack | None = None
        if options.stack is not None:
            stack = await resources.enter_async_context(running_stack(options.stack, progress.say))
            options = replace(options, queue=stack.queue, scheduler=stack.scheduler)
        client = await resources.enter_async_context(Client(options.queue, options.scheduler))
        store_id = await _find_queue(options, progress.say)
        header = _header(options, source, journal, store_id)
        is_new = journal.header is None
        journal.start(header)
        model = "" if options.stack else options.model
        look_again = partial(_look, options, wait_s=options.wait_s, say=progress.say)
        late = resources.enter_context(Late(progress.say, WHY_AFTER_S))
        served = await _served_models(options, late.set)
        plan = Plan(header.batch, options.channel, model, served, look_again)
        before, started = await _totals(options), time.monotonic()
        run = BatchRun(client, source, journal, plan, progress)
        progress.begin(journal.answered)
        try:
            await _unless_services_fail(run.run(), stack)
        except (InvalidRequest, PermissionDenied):
            if is_new and not run.has_submitted and not journal.answered:
                journal.forget()  # so that it stands in the way of no other run
            raise
        elapsed_s = time.monotonic() - started
        await _write(journal, source, options.target)
        progress.close()
        after = await _totals(options)
        grown = after.since(before, run.tally.granted_here) if before and after else None
        summary = summarize(run.tally, elapsed_s, grown)
        _report(options, summary, len(source), progress.say)


def _interrupted(options: Options, source: InputFile, journal: Journal) -> str:
    """Say what became of the lines, how to go on and how to give up."""
    if journal.header is None:
        return "interrupted before any line was submitted"
    if journal.removed:
        return f"interrupted; all {len(source)} lines are answered, the answers are in {options.target}"
    if journal.answered == len(source):
        return (
            f"interrupted; all {len(source)} lines are answered, {options.target} is not written\n"
            f"  to write   run the same command again"
        )
    cancel = f"penstock cancel --batch {journal.header.batch}"
    if options.stack is None:
        if options.queue != DEFAULT_QUEUE_ADDRESS:
            cancel += f" --queue {options.queue}"
        fate = "what is submitted stays in the queue and goes on running while workers run"
    else:
        data_dir = options.stack.data_dir
        fate = f"what is submitted stays in the queue in {data_dir} and runs when services are started on it"
        cancel += f" (after penstock up --data-dir {data_dir})"
    return (
        f"interrupted; {journal.answered} of {len(source)} lines are answered, {fate}\n"
        f"  to go on   run the same command again\n"
        f"  to drop    {cancel}"
    )


def _header(options: Options, source: InputFile, journal: Journal, store_id: str) -> Header:
    """Return the journal's header; a run begun with --fresh is resumed under its own name."""
    key = batch_name(options.target, source, options.model)
    if options.fresh:
        batch = batch_name(options.target, source, options.model, secrets.token_hex(8))
    elif journal.header is not None and journal.header.key == key:
        batch = journal.header.batch
    else:
        batch = key
    return Header(key, batch, store_id, source.sha256)


async def _unless_services_fail(work: Coroutine[Any, Any, None], stack: Stack | None) -> None:
    """Do the work; raises CommandError as soon as a service of the stack is beyond help."""
    if stack is None:
        await work
        return
    working, failing = asyncio.create_task(work), asyncio.create_task(stack.supervisor.failed())
    try:
        ended, _ = await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        working.cancel()
        failing.cancel()
        await asyncio.gather(working, failing, return_exceptions=True)


async def _find_queue(options: Options, say: Say) -> str:
    """Return the store's name. Raises CommandError with what to do if no queue answers."""
    try:
        return await _store_id(options, retry_for_s=0)
    except Unavailable as error:
        missing = error
    if options.wait_s:
        say(f"no queue answers on {options.queue} yet; waiting for at most {options.wait_s:g} s")
        try:
            return await _store_id(options, options.wait_s)
        except Unavailable as error:
            missing = error
    hint = f"; {HOW_TO_START}, or add --up" if isinstance(missing, NobodyAnswers) else ""
    raise CommandError(f"{missing}{hint}", EX_UNAVAILABLE)


async def _store_id(options: Options, retry_for_s: float) -> str:
    async with Client(options.queue, options.scheduler, retry_for_s=retry_for_s) as client:
        return (await client.stats()).store_id


class Late(AbstractContextManager["Late"]):
    """A line that is said if the work takes long; make it inside the event loop."""

    def __init__(self, say: Say, after_s: float) -> None:
        """Have nothing to say yet."""
        self._say, self._after_s = say, after_s
        self._timer: asyncio.TimerHandle | None = None

    def set(self, text: str) -> None:
        """Say `text` in a while."""
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._say, text)

    def __exit__(self, *_: object) -> None:
        """Say it no more."""
        if self._timer is not None:
            self._timer.cancel()


async def _served_models(options: Options, say: Say) -> set[str] | None:
    """Return the names the connected workers answer to; None if no scheduler or no worker is there to ask.

    Why a scheduler does not tell is said: then nobody finds out that a line's model is misspelt.

    Workers that this command started are waited for: they are ready, but may not have met the scheduler yet.
    """
    wait_s = WORKERS_MEET_SCHEDULER_S if options.stack else min(options.wait_s, SUMMARY_TRIES_S)
    return await _look(options, (), wait_s, say_why=say)


async def _look(
    options: Options, models: Collection[str], wait_s: float, say: Say | None = None, say_why: Say | None = None
) -> set[str] | None:
    """Return what is served once there are workers, and some for each of `models`, or `wait_s` seconds are over."""
    patience = Patience(wait_s)
    why = ""
    async with Client(options.queue, options.scheduler, retry_for_s=0) as client:
        while True:
            names: set[str] = set()
            try:
                status = await client.fleet()
                names = {n for worker in status.workers for n in (worker.model, *worker.model_aliases) if n}
                why = ""
            except PenstockError as error:
                why = str(error)
            if names and names.issuperset(models):
                return names
            if say is not None and wait_s:
                missing = ", ".join(sorted(repr(model) for model in set(models) - names))
                say(f"no worker serves {missing} yet; waiting for at most {wait_s:g} s")
                say = None
            try:
                await patience.wait_or_raise(Unavailable("no worker"))
            except Unavailable:
                if why and say_why is not None:
                    say_why(f"which models are served is not known ({why}): lines for one that none serves will wait")
                return names or None


async def _totals(options: Options) -> EngineTotals | None:
    """Return the fleet's totals; None if no scheduler answers."""
    async with Client(options.queue, options.scheduler, retry_for_s=SUMMARY_TRIES_S) as client:
        with suppress(PenstockError):
            return totals_of(await client.fleet())
    return None


async def _write(journal: Journal, source: InputFile, target: Path) -> None:
    """Write the output file; raises CommandError if that fails, the journal being kept.

    Cancelled, it tells the thread that writes to stop and ends when that has: the journal, and with it the lock that
    keeps other runs away, is never closed while somebody writes.
    """
    stop = threading.Event()
    writing = asyncio.create_task(asyncio.to_thread(write_output, journal, source, target, stop.is_set))
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError:
            stop.set()
    try:
        writing.result()
    except WriteStoppedError:
        raise asyncio.CancelledError from None
    except OSError as error:
        raise CommandError(f"cannot write {target}: {error.strerror}", EX_CANNOT_WRITE) from None
    if stop.is_set():
        raise asyncio.CancelledError


def _report(options: Options, summary: Summary, lines: int, say: Callable[[str], None]) -> None:
    if summary.answered_earlier:
        say(f"{summary.answered_earlier} of {lines} lines were answered earlier; --fresh runs them again")
    if summary.requests:
        for text in summary.lines():
            say(text)
    elif summary.bad_lines:
        say(f"{summary.bad_lines} of {lines} lines are wrong; their answers say why")
    say(f"answers      {options.target}")
    if options.summary_json is not None:
        try:
            options.summary_json.write_text(json.dumps(summary.as_dict(), indent=2) + "\n")
        except OSError as error:
            raise CommandError(f"cannot write {options.summary_json}: {error.strerror}", EX_CANNOT_WRITE) from None
