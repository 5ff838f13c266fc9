"""Run simulations: `python -m tests.simulation --seeds 200` or `--seed 17` to replay one with its transcript."""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter

from tests.simulation.run import Simulation
from tests.simulation.world import Options


def play(seed: int, show: bool) -> Counter[str] | None:
    """Play one seed; None, after printing the transcript's end, if a promise was broken."""
    options = Options.draw(seed)
    simulation = Simulation(options)
    if show:
        print(options)
    try:
        seen = simulation.run()
    except Exception:
        print(f"seed {seed} failed; replay it with: make sim SEED={seed}\n{options}")
        print("\n".join(simulation.world.log[-60:]))
        traceback.print_exc()
        return None
    if show:
        print("\n".join(simulation.world.log))
    return seen


def main() -> int:
    """Play the seeds asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="replay one seed and print its transcript")
    parser.add_argument("--seeds", type=int, default=200, help="play this many seeds, from a random first one")
    options = parser.parse_args()
    if options.seed is not None:
        return int(play(options.seed, True) is None)
    first = random.SystemRandom().randrange(10**9)
    print(f"seeds {first} to {first + options.seeds - 1}")
    seen: Counter[str] = Counter()
    for seed in range(first, first + options.seeds):
        happened = play(seed, False)
        if happened is None:
            return 1
        seen.update(happened)
    for kind, count in sorted(seen.items()):
        print(f"{count:8} {kind}")
    print(f"{options.seeds} seeds, nothing lost, nothing twice, every credit home")
    return 0


if __name__ == "__main__":
    sys.exit(main())
