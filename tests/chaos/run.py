"""One run: the fault-free answers, the stack, the faults, the verdict."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.tiny_model import is_model, make_tiny_model
from tests.chaos import lines, schedule
from tests.chaos.disk import Disk, leave_the_mounts
from tests.chaos.engines import CLIENTS, Engine
from tests.chaos.faults import Injector
from tests.chaos.gauges import Gauges
from tests.chaos.process import all_gone, name_of
from tests.chaos.stack import Plan, Stack
from tests.chaos.verdict import Verdict, judge_credits, judge_outputs, judge_processes, judge_results
from tests.support.fleet import descendants

PR_SET_CHILD_SUBREAPER = 36
"""`prctl` option: orphaned descendants become our children, so that none can hide (Linux)."""

MOST_SILENCE_S = 120.0
"""Without a single answer for so long a run is given up; every fault is over and every restart done long before."""

POLL_S = 0.2
SAY_EVERY_S = 15.0

DISK_BYTES = 1024 * 2**20
"""Of the queue's own disk: room for the store of 100,000 requests while RocksDB compacts it."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    seed: int
    engine: Engine
    requests: int
    """Lines of the batch."""
    directory: Path
    rows: Sequence[schedule.Row]
    say: Callable[[str], None]


async def run(options: Options) -> tuple[dict[str, Any], bool]:
    """Run everything; return the report and whether every promise was kept."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    shutil.rmtree(options.directory / "run", ignore_errors=True)
    disk = _disk(options)
    faults = schedule.draw(options.seed, options.requests, options.rows, _groups(options, disk is not None))
    options.say(f"seed {options.seed}: {options.requests} requests, {len(faults)} faults")
    for fault in faults:
        options.say(str(fault))
    expected, fault_free_s = await _fault_free(options)
    plan = _plan(options, options.directory / "run", options.requests, disk)
    verdict, began_s = Verdict(options.requests), time.monotonic()
    async with _running(plan) as stack:
        gauges = Gauges(stack)
        injector = Injector(stack, gauges, disk)
        started_s = time.monotonic()
        not_reached, silent_s = await _through(stack, injector, gauges, faults)
        elapsed_s = time.monotonic() - started_s
        options.say(f"{stack.answered} lines answered; waiting for every credit to come home")
        await judge_credits(verdict, stack, gauges)
        answers = {f"line-{n}": expected[n % len(expected)] for n in range(options.requests)}
        judge_outputs(verdict, stack, answers)
        await judge_results(verdict, stack, gauges)
        ended_wrong = await stack.stop()
    left = [f"{name_of(pid)} (process {pid}) is left" for pid in await all_gone(descendants(os.getpid()), 5.0)]
    judge_processes(verdict, stack, ended_wrong, [*injector.orphans, *left])
    verdict.note(not_reached, "fault of the schedule that the batch ended before")
    for problem in verdict.problems:
        options.say(f"BROKEN: {problem}")
    options.say(f"the whole run took {time.monotonic() - began_s:.0f} s, starts and checks included")
    report = {
        "requests": options.requests,
        "lost": verdict.lost,
        "duplicated": verdict.duplicated,
        "credit_violations": verdict.credit_violations,
        "kills": dict(sorted(injector.kills.items())),
        "recompute_pct": verdict.recompute_pct,
        "recompute_measured_pct": verdict.measured_pct,
        "other_text": verdict.other_text,
        "orphans": verdict.orphans,
        "other_faults": dict(sorted(injector.others.items())),
        "attempts": {str(count): seen for count, seen in sorted(verdict.attempts.items())},
        "handed_back": verdict.handed_back,
        "silent_s": round(silent_s),
        "elapsed_s": round(elapsed_s),
        "fault_free_s": round(fault_free_s) if len(expected) == options.requests else None,
        "broken": len(verdict.problems),
        "seed": options.seed,
    }
    return report, not verdict.problems


def _disk(options: Options) -> Disk | None:
    """Return a small disk for the queue if the schedule fills it and the system lets us make one."""
    if not any(row.group == "disk" for row in options.rows):
        return None
    try:
        if not leave_the_mounts():
            raise OSError("no mount namespace")
        return Disk(options.directory / "run" / "disk", DISK_BYTES)
    except OSError as error:
        options.say(f"SKIPPED: the faults of the disk, for mounting a small one is not permitted here: {error}")
        return None


def _groups(options: Options, with_disk: bool) -> dict[str, Sequence[str]]:
    workers = [f"worker-{number}" for number in range(1, options.engine.workers + 1)]
    clients = [f"client-{number}" for number in range(1, CLIENTS + 1)]
    work_links = [f"{worker}>queue" for worker in workers]
    links = [*work_links, *(f"{worker}>scheduler" for worker in workers), "scheduler>queue"]
    return {
        "queue": ["queue"],
        "scheduler": ["scheduler"],
        "worker": workers,
        "client": clients,
        "link": [*links, *(f"{client}>queue" for client in clients)],
        "work-link": work_links,
        "disk": ["disk"] if with_disk else [],
        "all": ["all"],
    }


def _plan(options: Options, directory: Path, count: int, disk: Disk | None = None) -> Plan:
    engine = options.engine
    flags = list(engine.flags)
    if engine.needs_model:
        model = options.directory / "model"
        if not is_model(model):
            make_tiny_model(model)
        flags += ["--model", str(model)]
    made = lines.batch(count, engine.distinct, engine.most_tokens)
    parts = lines.write_parts(made, CLIENTS, engine.parts, directory / "files")
    data = (disk.path if disk else directory) / "queue"
    return Plan(directory, data, flags, parts, engine.workers, options.say)


async def _fault_free(options: Options) -> tuple[list[str], float]:
    """Return what each distinct line is answered without faults, and the seconds that took; found again if known.

    Raises RuntimeError if the batch does not even end without faults.
    """
    engine = options.engine
    count = min(engine.distinct, options.requests)
    name = lines.name_of(lines.batch(count, engine.distinct, engine.most_tokens), engine.flags)
    known = options.directory / f"fault-free-{name}.json"
    if known.exists():
        found = json.loads(known.read_text())
        return found["texts"], found["elapsed_s"]
    options.say(f"first the same without faults: {count} lines")
    directory = options.directory / "fault-free"
    shutil.rmtree(directory, ignore_errors=True)
    async with _running(_plan(options, directory, count)) as stack:
        started_s = time.monotonic()
        await _through(stack, None, Gauges(stack), [])
        elapsed_s = time.monotonic() - started_s
        if not stack.finished:
            raise RuntimeError(f"even without faults not every line was answered; logs are in {directory / 'logs'}")
        texts = lines.texts(stack.outputs)
        await stack.stop()
    ordered = [texts[f"line-{number}"] for number in range(count)]
    known.write_text(json.dumps({"texts": ordered, "elapsed_s": elapsed_s}))
    return ordered, elapsed_s


@asynccontextmanager
async def _running(plan: Plan) -> AsyncIterator[Stack]:
    """Start a stack; whatever happens, nothing of it is left running."""
    stack = Stack(plan)
    try:
        await stack.start()
        yield stack
    finally:
        stack.kill()


async def _through(
    stack: Stack, injector: Injector | None, gauges: Gauges, faults: Sequence[schedule.Fault]
) -> tuple[int, float]:
    """Run the batch to its end under the faults; return how many faults came too late, and the silent seconds."""
    await stack.begin()
    watching = asyncio.create_task(gauges.watch())
    driving = asyncio.create_task(injector.run(faults)) if injector is not None else None
    try:
        silent_s = await _until_finished(stack)
        return await driving if driving is not None else 0, silent_s
    finally:
        for task in (watching, driving):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in (watching, driving) if task is not None), return_exceptions=True)


async def _until_finished(stack: Stack) -> float:
    """Return when all is answered, or when nothing has been for too long; return the seconds without an answer.

    Counted is what is beyond the first second of each silence.
    """
    answered, silent_s = -1, 0.0
    since_s = said_s = time.monotonic()
    while not stack.finished:
        await asyncio.sleep(POLL_S)
        now_s = time.monotonic()
        if stack.answered != answered:
            silent_s += max(now_s - since_s - 1.0, 0.0)
            answered, since_s = stack.answered, now_s
        elif now_s - since_s > MOST_SILENCE_S:
            stack.plan.say(f"no answer for {MOST_SILENCE_S:.0f} s: the run is given up")
            break
        if now_s - said_s > SAY_EVERY_S:
            said_s = now_s
            stack.plan.say(f"{answered:>6} answers")
    return silent_s
