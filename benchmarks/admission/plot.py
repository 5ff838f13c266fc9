"""The KV cache over time, one strip per policy, from what the benchmarks wrote.

Usage: python -m benchmarks.admission.plot build/bench/kv-bound-*-0.json --png build/bench/kv-bound.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STRIP_INCHES = 1.3
"""Height of one policy's strip."""


def plot(outcomes: Sequence[dict[str, Any]], png: Path, title: str) -> None:
    """Draw usage over time for each outcome (as the benchmarks write them), on one time axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    size = (10, STRIP_INCHES * len(outcomes) + 0.8)
    figure, strips = plt.subplots(len(outcomes), 1, sharex=True, sharey=True, figsize=size, squeeze=False)
    for strip, outcome in zip(strips[:, 0], outcomes, strict=True):
        moments = [sample[0] for sample in outcome["samples"]]
        usage = [sample[2] for sample in outcome["samples"]]
        strip.fill_between(moments, usage, step="post", linewidth=0, alpha=0.7)
        strip.set_ylim(0, 1)
        preempted = f"{outcome['preemptions_per_1000']:.1f} preemptions per 1,000"
        text = f"{outcome['policy']}: usage {outcome['usage']:.2f} while a backlog exists, {preempted}"
        strip.set_title(text, loc="left", fontsize=9)
    strips[-1, 0].set_xlabel("seconds")
    figure.suptitle(title, fontsize=10)
    figure.supylabel("share of the KV blocks held", fontsize=9)
    figure.tight_layout()
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=110)
    plt.close(figure)


def main() -> None:
    """Draw the named files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--png", type=Path, required=True)
    options = parser.parse_args()
    outcomes = [json.loads(path.read_text()) for path in options.files]
    plot(outcomes, options.png, outcomes[0]["workload"])


if __name__ == "__main__":
    main()
