"""Run simulations: `--seeds 200` plays so many, `--seed 17` replays one with its transcript.

`--fixed n` plays the seeds 0 to n - 1 besides, `--plant name` puts a bug in and looks for it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from penstock.exits import EX_USAGE
from tests.simulation.coverage import Cells, missing, table
from tests.simulation.plan import Plan
from tests.simulation.planted import PLANTS, plant
from tests.simulation.run import Simulation
from tests.simulation.shrink import shrink

ENOUGH_FOR_FAULTS = 300
"""Seeds from which on every fault must have happened."""

ENOUGH_FOR_CELLS = 5000
"""Seeds from which on every fault must have met every state it can meet."""

CHUNK = 8
"""Seeds handed to a core at once: some hundred milliseconds."""

TRANSCRIPT_LINES = 400
"""Of a failure's transcript, from its end."""


class Played(NamedTuple):
    """What became of one seed."""

    seed: int
    cells: Cells
    failure: str


def play(seed: int) -> Played:
    """Play one seed."""
    simulation = Simulation(Plan.draw(seed))
    failure = ""
    try:
        simulation.run()
    except Exception as error:  # whatever a core raises is a failure
        failure = f"{type(error).__name__}: {error}"
    return Played(seed, simulation.coverage.cells, failure)


def play_planted(name: str, seed: int) -> Played:
    """Play one seed with a bug planted."""
    with plant(name):
        return play(seed)


def play_all(seeds: Iterable[int], bug: str, jobs: int) -> Iterator[Played]:
    """Play seeds on several cores; what comes back is in the order of the seeds."""
    work = partial(play_planted, bug)
    if jobs == 1:
        yield from map(work, seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(work, seeds, CHUNK)


def replay(plan: Plan) -> bool:
    """Play a plan with its transcript; return whether every promise was kept."""
    simulation = Simulation(plan, verbose=True)
    try:
        simulation.run()
        kept = "every promise was kept"
    except Exception as error:  # whatever a core raises is a failure
        kept = f"{type(error).__name__}: {error}"
    faults = "\n".join(f"{fault.at_ns / 1e6:10.3f} {fault}" for fault in sorted(plan.faults, key=lambda f: f.at_ns))
    requests = ",".join(str(wanted.number) for wanted in plan.requests)
    print(f"faults:\n{faults or 'none'}\nrequests: {requests or 'none'}\ntranscript:")
    print("\n".join(simulation.world.log[-TRANSCRIPT_LINES:]))
    print(kept)
    return kept == "every promise was kept"


def explain(failed: Played, bug: str) -> None:
    """Shrink a failure and print it: its options, the command that replays it, and its transcript."""
    whole = Plan.draw(failed.seed)
    print(f"{whole.options}\nseed {failed.seed} failed: {failed.failure}\nshrinking ...", flush=True)
    with plant(bug):
        smallest, failure = shrink(whole, failed.failure)
    faults = ",".join(str(fault.number) for fault in smallest.faults) or "none"
    requests = ",".join(str(wanted.number) for wanted in smallest.requests) or "none"
    command = f"make sim SEED={failed.seed} FAULTS={faults} REQUESTS={requests}" + (f" PLANT={bug}" if bug else "")
    print(f"shrunk to {len(smallest.faults)} of {len(whole.faults)} faults and {len(smallest.requests)} of", end=" ")
    print(f"{len(whole.requests)} requests: {failure}")
    with plant(bug):
        replay(smallest)
    print(f"replay with: {command}")


def run_seeds(seeds: Iterable[int], count: int, bug: str, jobs: int) -> int:
    """Play seeds until one fails; return the exit status."""
    cells: Cells = Counter()
    began_s = time.perf_counter()
    for number, played in enumerate(play_all(seeds, bug, jobs), 1):
        cells.update(played.cells)
        if played.failure:
            explain(played, bug)
            print(f"failed after {number} seeds")
            return 1
    if bug:
        print(f"{count} seeds found nothing")
        return 0
    print(table(cells))
    gaps = missing(cells, count >= ENOUGH_FOR_CELLS) if count >= ENOUGH_FOR_FAULTS else []
    if gaps:
        print(f"never happened, so the seeds prove less than they say: {gaps}")
        return 1
    print(f"{time.perf_counter() - began_s:.0f} s on {jobs} cores")
    print(f"{count} seeds, nothing lost, nothing twice, every credit home")
    return 0


def find_plant(seeds: Iterable[int], count: int, bug: str, jobs: int) -> int:
    """Look for a planted bug; it is found if the run fails."""
    status = run_seeds(seeds, count, bug, jobs)
    print(f"the planted bug {bug!r} was {'found' if status else 'NOT found'}")
    return 1 - status


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads a number that is not smaller, for an option."""

    def read(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    read.__name__ = "number"  # as argparse says what it expected
    return read


def numbers(text: str) -> list[int]:
    """Return the numbers of a list such as `3,7`, none for `none`; raises ValueError."""
    return [] if text == "none" else [int(number) for number in text.split(",")]


def arguments() -> argparse.Namespace:
    """Return what the command line asks for; ends with 2 if that is nothing that can be played."""
    parser = argparse.ArgumentParser("tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=at_least(0), help="replay one seed and print its transcript")
    parser.add_argument("--faults", type=numbers, help="with --seed: numbers of the faults to keep, or none")
    parser.add_argument("--requests", type=numbers, help="with --seed: numbers of the requests to keep, or none")
    parser.add_argument("--seeds", type=at_least(0), help="play this many seeds; 200 if not given")
    parser.add_argument("--first", type=at_least(0), help="the first of them; drawn if not given")
    parser.add_argument("--fixed", type=at_least(0), default=0, help="play the seeds 0 to FIXED - 1 besides")
    parser.add_argument("--plant", choices=sorted(PLANTS), default="", help="put this bug in, and look for it")
    parser.add_argument("--jobs", type=at_least(1), default=len(os.sched_getaffinity(0)), help="cores to use")
    options = parser.parse_args()
    many = options.seeds is not None or options.first is not None or options.fixed
    if options.seed is not None and many:
        parser.error("--seed replays one seed; --seeds, --first and --fixed do not go with it")
    if options.seed is None and (options.faults, options.requests) != (None, None):
        parser.error("--faults and --requests cut the plan of one seed: they go with --seed")
    if options.seeds is None:
        options.seeds = 200
    if options.seed is None and not options.fixed + options.seeds:
        parser.error("--seeds 0: nothing would be played, and nothing shown")
    return options


def unknown(plan: Plan, options: argparse.Namespace) -> str:
    """Return which number to keep the plan of the seed does not have; empty if it has all."""
    faults, requests = {fault.number for fault in plan.faults}, {wanted.number for wanted in plan.requests}
    if stray := sorted(set(options.faults or ()) - faults):
        return f"--faults: seed {plan.options.seed} has no fault {stray[0]}; it has {len(faults)}, from 0"
    if stray := sorted(set(options.requests or ()) - requests):
        return f"--requests: seed {plan.options.seed} has no request {stray[0]}; it has {len(requests)}, from 0"
    return ""


def play_one(options: argparse.Namespace) -> int:
    """Replay one seed, cut as asked for; return the exit status."""
    plan = Plan.draw(options.seed)
    if problem := unknown(plan, options):
        print(f"tests.simulation: {problem}", file=sys.stderr)
        return EX_USAGE
    print(plan.options)
    with plant(options.plant):
        return int(not replay(plan.cut(options.faults, options.requests)))


def main() -> int:
    """Play the seeds asked for; return the exit status."""
    options = arguments()
    logging.disable(logging.CRITICAL)  # the committer logs each failure of the store, and there are many
    if options.seed is not None:
        return play_one(options)
    first = options.first if options.first is not None else random.SystemRandom().randrange(10**9)
    count = options.fixed + options.seeds
    seeds = itertools.chain(range(options.fixed), range(first, first + options.seeds))
    fixed = f"0 to {options.fixed - 1}" if options.fixed else ""
    fresh = f"{first} to {first + options.seeds - 1}" if options.seeds else ""
    which = " and ".join(part for part in (fixed, fresh) if part)
    print(f"seeds {which} (make sim SEED=... prints a seed's options)", flush=True)
    if options.plant:
        return find_plant(seeds, count, options.plant, options.jobs)
    return run_seeds(seeds, count, "", options.jobs)


if __name__ == "__main__":
    sys.exit(main())
