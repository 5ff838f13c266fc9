"""`penstock run-batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from penstock.batch.finished import Finished, UnknownLinesError, have_what_it_had, without_request
from penstock.batch.journal import (
    Header,
    Journal,
    JournalError,
    JournalWriteError,
    WriteStoppedError,
    journal_path,
    write_output,
)
from penstock.batch.reader import InputFile, InputReadError
from penstock.batch.runner import BatchRun, Plan, batch_name, former_name, fresh_name, is_run_of
from penstock.batch.summary import Summary, summarize
from penstock.cli.batch_fleet import (
    Late,
    Peers,
    command_of,
    find_queue,
    fleet_totals,
    look_again,
    served_models,
    tell_what_is_late,
    tell_what_is_left,
    telling_what_waits,
    totals_at_the_end,
)
from penstock.cli.batch_paths import no_url, refuse_lost_files, target_of
from penstock.cli.calls import QueueOption, SchedulerOption, call
from penstock.cli.config import ConfigOption, take_config
from penstock.cli.errors import CommandError
from penstock.cli.interrupt import Interrupted
from penstock.cli.progress import Progress, said_if_long
from penstock.cli.stack import Stack, StackPlan, running_stack
from penstock.cli.up import DEFAULT_DATA_DIR, flags_for_the_engine
from penstock.cli.vain import Say
from penstock.client import Client
from penstock.errors import InvalidRequest, PermissionDenied
from penstock.exits import EX_CANNOT_WRITE, EX_INTERRUPTED, EX_NO_INPUT, EX_USAGE
from penstock.names import BATCH_CHANNEL

WHY_AFTER_S = 5.0
"""A run that has taken so long may be waiting for a model that nobody serves."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was told."""

    target: Path
    queue: str
    scheduler: str
    channel: str
    model: str
    fresh: bool
    retry_failed: bool
    wait_s: float
    summary_json: Path | None
    stack: StackPlan | None

    @property
    def queue_later(self) -> str:
        """Where the queue is once this command has ended: with --up, where `penstock up` has it by itself."""
        return DEFAULT_QUEUE_ADDRESS if self.stack else self.queue


def run_batch(
    context: typer.Context,
    input_file: Annotated[
        Path,
        typer.Option("-i", "--input-file", parser=no_url, metavar="PATH", help="Requests, one JSON object a line."),
    ],
    output_file: Annotated[
        Path, typer.Option("-o", "--output-file", parser=no_url, metavar="PATH", help="Answers, in input order.")
    ],
    model: Annotated[
        str, typer.Option(help="With --up: the model to serve. Without: the model of lines that name none.")
    ] = "",
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
    scheduler: SchedulerOption = DEFAULT_SCHEDULER_ADDRESS,
    channel: Annotated[
        str, typer.Option(help="Channel the requests wait in; without it `batch`, or another if there is none.")
    ] = "",
    start: Annotated[bool, typer.Option("--up", help="Start the services for this run, stop them after it.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="With --up: number of workers.")] = 1,
    data_dir: Annotated[
        Path, typer.Option(help="With --up: queue data, logs and the tiny model.", readable=False)
    ] = DEFAULT_DATA_DIR,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run every line again; forget earlier answers. Killed, go on without it.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run the lines again whose answers are errors; keep the others.")
    ] = False,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the services, and workers of all models.")
    ] = 0.0,
    summary_json: Annotated[
        Path | None, typer.Option(parser=no_url, metavar="PATH", help="Write the summary to this file as well.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Answer a file of requests in the OpenAI batch format. Killed half-way, the same command goes on where it was.

    With --up, unknown flags go to the workers' engine. Exit status 0 means that every line has its answer.
    """
    flags = flags_for_the_engine(context)
    if flags and not start:
        raise CommandError(f"no such option: {flags[0]} (engine flags need --up)", EX_USAGE)
    if fresh and retry_failed:
        raise CommandError("--retry-failed keeps answers that --fresh forgets; give one of them", EX_USAGE)
    for name, flag in (("workers", "--workers"), ("data_dir", "--data-dir")):
        given = context.get_parameter_source(name)
        if not start and given is not None and given.name == "COMMANDLINE":
            raise CommandError(f"{flag} needs --up", EX_USAGE)
    _refuse_what_is_not_utf_8({"--channel": channel} if start else {"--channel": channel, "--model": model})
    take_config(config, start)
    stack = StackPlan(data_dir, workers, model, flags, base_port=0) if start else None
    target = target_of(output_file)
    options = Options(target, queue, scheduler, channel, model, fresh, retry_failed, wait_s, summary_json, stack)
    refuse_lost_files(input_file, target, summary_json)
    try:
        with said_if_long(f"reading {input_file}, for where its lines are"):
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


def _with_journal(options: Options, source: InputFile) -> None:
    path = journal_path(options.target)
    try:
        with said_if_long(f"reading {path}, for the answers that there are"):
            journal = Journal(path, source, options.fresh, options.target)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}", EX_CANNOT_WRITE) from None
    except JournalError as error:
        raise CommandError(str(error), EX_USAGE) from None
    try:
        _with_errors_told(options, source, journal)
    finally:
        if journal.is_empty:
            journal.remove()
        journal.close()


def _with_errors_told(options: Options, source: InputFile, journal: Journal) -> None:
    try:
        call(_run(options, source, journal))
        return
    except Interrupted:
        raise CommandError(_interrupted(options, source, journal), EX_INTERRUPTED) from None
    except CommandError as error:
        failed = error
    except InputReadError as error:
        failed = CommandError(str(error), EX_NO_INPUT)
    except JournalError as error:
        failed = CommandError(str(error), EX_CANNOT_WRITE if isinstance(error, JournalWriteError) else EX_USAGE)
    if options.fresh and journal.header is not None and not (journal.is_empty or journal.removed):
        # Given again, the option would discard what this run has left.
        failed = CommandError(f"{failed}\n  to go on   {_again(options)}", failed.status)
    raise failed


def _again(options: Options) -> str:
    """Say which command goes on with a run: --fresh would begin another."""
    return "run the same command without --fresh" if options.fresh else "run the same command again"


async def _run(options: Options, source: InputFile, journal: Journal) -> None:
    async with AsyncExitStack() as resources:
        progress = resources.enter_context(Progress(len(source)))
        peers, stack = Peers(options.queue, options.scheduler, options.wait_s), None
        if options.stack is not None:
            stack = await resources.enter_async_context(running_stack(options.stack, progress.say))
            peers = Peers(stack.queue, stack.scheduler, options.wait_s)
        client = await resources.enter_async_context(Client(peers.queue, peers.scheduler))
        found = await find_queue(peers, progress.say)
        output = Finished(options.target)
        is_new = journal.header is None
        ended = await _ended(options, source, output, client) if is_new or options.retry_failed else ""
        header = _header(options, source, journal, found.store_id, ended)
        for batch in {journal.discards, header.key, ended} - {"", header.batch} if options.fresh else ():
            await tell_what_is_left(client, batch, peers, progress.say)
        journal.start(header, of_answered=options.retry_failed)
        model = "" if options.stack else options.model
        late = resources.enter_context(Late(progress.say, WHY_AFTER_S))
        served = await served_models(peers, stack is not None, late.set)
        channel = options.channel or found.batch_channel or BATCH_CHANNEL  # an older queue says nothing
        again = partial(look_again, peers, served, progress.say)
        plan = Plan(header.batch, channel, model, served.names, options.retry_failed, again)
        if journal.of_answered:
            had, absent = output if header.batch == ended else None, partial(without_request, client, header.batch)
            plan = replace(plan, complete=partial(have_what_it_had, journal, source, had, absent, progress.passed))
        before, started = await fleet_totals(peers), time.monotonic()
        run = BatchRun(client, source, journal, plan, progress)
        progress.begin(journal.answered)
        try:
            async with telling_what_waits(peers, header.batch, run.unserved, _again(options), progress.say):
                await _unless_services_fail(run.run(), stack)
        except UnknownLinesError as error:
            if is_new:
                journal.forget()
            raise CommandError(_unknown(options, source, error.lines), EX_USAGE) from None
        except (InvalidRequest, PermissionDenied):
            if is_new and not run.has_submitted and not journal.answered:
                journal.forget()  # so that it stands in the way of no other run
            raise
        elapsed_s = time.monotonic() - started
        if run.late:
            tell_what_is_late(run.late, header.batch, options.queue_later, _again(options), progress.say)
        with said_if_long(f"writing {options.target}", progress.say):
            await _write(journal, source, options.target)
        progress.close()
        after = before and await totals_at_the_end(peers, before, run.tally.granted_here)
        grown = after.since(before, run.tally.granted_here) if before and after else None
        summary = summarize(run.tally, elapsed_s, grown)
        _report(options, summary, len(source), progress.say)


def _keys(options: Options, source: InputFile) -> tuple[str, str]:
    """Return the names that a run of this command has, its own and that by former versions."""
    return batch_name(options.target, source, options.model), former_name(options.target, source, options.model)


async def _ended(options: Options, source: InputFile, output: Finished, client: Client) -> str:
    """Return the batch whose answers the output has, empty if that is none of this command's, or not known."""
    with said_if_long(f"reading {options.target}, for which run wrote it"):
        batch = await output.batch(client)
    return batch if any(is_run_of(batch, key) for key in _keys(options, source)) else ""


def _header(options: Options, source: InputFile, journal: Journal, store_id: str, ended: str) -> Header:
    """Return the journal's header; a run begun with --fresh, or by a former version, is resumed under its own name.

    So is one that has `ended`, which is the last: its output has replaced those of the others.
    """
    keys = _keys(options, source)
    key = batch = keys[0]
    found = journal.header
    if options.fresh:
        batch = fresh_name(key)
    elif found is not None and found.key in keys:
        key, batch = found.key, found.batch
    elif ended:
        key, batch = next(key for key in keys if is_run_of(ended, key)), ended
    return Header(key, batch, store_id, source.sha256)


def _unknown(options: Options, source: InputFile, lines: int) -> str:
    """Say why failed lines are not run again where it is not known of so many whether they are some."""
    return (
        f"--retry-failed: of {lines} of {len(source)} lines it is not known that they failed. They were never run, or "
        f"the queue has their results no more, deleted or older than it keeps them, and {options.target} does not say "
        "how they ended, or not that it is of this run; without --retry-failed the same command runs these lines, and "
        "replaces the answers that the output has of them"
    )


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


def _report(options: Options, summary: Summary, lines: int, say: Say) -> None:
    if summary.answered_earlier:
        say(summary.earlier(lines))
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


def _interrupted(options: Options, source: InputFile, journal: Journal) -> str:
    """Say what became of the lines, how to go on and how to give up."""
    if journal.header is None:
        return "interrupted before any line was submitted"
    if journal.removed:
        return f"interrupted; all {len(source)} lines are answered, the answers are in {options.target}"
    if journal.answered == len(source):
        return (
            f"interrupted; all {len(source)} lines are answered, {options.target} is not written\n"
            f"  to write   {_again(options)}"
        )
    cancel = command_of("cancel", journal.header.batch, options.queue_later)
    if options.stack is None:
        fate = "what is submitted stays in the queue and goes on running while workers run"
    else:
        data_dir = options.stack.data_dir
        fate = f"what is submitted stays in the queue in {data_dir} and runs when services are started on it"
        cancel += f" (after penstock up --data-dir {data_dir})"
    return (
        f"interrupted; {journal.answered} of {len(source)} lines are answered, {fate}\n"
        f"  to go on   {_again(options)}\n"
        f"  to drop    {cancel}"
    )
