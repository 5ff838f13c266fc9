"""Arguments of the simulated engine, named as vLLM names them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

from penstock.exits import EX_CONFIG
from services.worker.engine import ENGINE_SCHEDULING
from services.worker.settings import PROGRAM
from services.worker.simulated.batch import Rules
from services.worker.simulated.profile import BLOCK_SIZE, PROFILES


class SimulatedSettings(NamedTuple):
    """Size, rules and speed of a simulated engine."""

    model: str = "simulated"
    model_aliases: tuple[str, ...] = ()
    num_blocks: int = 1024
    block_size: int = BLOCK_SIZE
    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    seed: int = 0
    profile: str = "instant"
    rules: Rules = Rules()


COUNTS = ("num_gpu_blocks_override", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
"""Arguments without which, or with none of what they count, there is nothing to run."""

MOST_COUNTED = 2**31 - 1
"""Far more than any engine has, and what the protocol's numbers hold."""


class WrongArgumentsError(ValueError):
    """Arguments that no simulated engine takes; the text says which, and why."""


def simulated_settings(
    model: str, aliases: tuple[str, ...], arguments: list[str], with_place: Callable[[str], str] = str
) -> SimulatedSettings:
    """Read engine arguments. Raises SystemExit(78) naming what is wrong, and `with_place` where it was given."""
    try:
        return read_arguments(model, aliases, arguments)
    except WrongArgumentsError as error:
        print(f"{PROGRAM}: {with_place(str(error))}", file=sys.stderr)
        raise SystemExit(EX_CONFIG) from None


def read_arguments(model: str, aliases: tuple[str, ...], arguments: list[str]) -> SimulatedSettings:
    """Read engine arguments. Raises WrongArgumentsError."""
    try:
        found, unknown = _parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise WrongArgumentsError(str(error)) from None
    if unknown:
        raise WrongArgumentsError(f"unknown arguments for the simulated engine: {' '.join(unknown)}")
    for name in COUNTS:
        given = getattr(found, name)
        if given is not None and not 1 <= given <= MOST_COUNTED:
            flag = name.replace("_", "-")
            raise WrongArgumentsError(f"--{flag} must be at least 1 and at most {MOST_COUNTED}")
    if found.max_num_batched_tokens < found.max_num_seqs:
        raise WrongArgumentsError("--max-num-batched-tokens must be at least --max-num-seqs")
    if not 0 <= found.watermark < 1:
        raise WrongArgumentsError("--watermark must be at least 0 and less than 1")
    return SimulatedSettings(
        model,
        aliases,
        _num_blocks(found),
        found.block_size,
        found.max_model_len,
        found.max_num_seqs,
        found.max_num_batched_tokens,
        found.seed,
        found.profile,
        Rules(
            found.watermark,
            found.long_prefill_token_threshold,
            found.scheduler_reserve_full_isl,
            found.enable_prefix_caching,
            found.scheduling_policy,
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("worker", allow_abbrev=False, exit_on_error=False, add_help=False)
    defaults = SimulatedSettings()
    rules = defaults.rules
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--num-gpu-blocks-override", type=int)
    parser.add_argument("--block-size", type=int, default=defaults.block_size)
    parser.add_argument("--max-model-len", type=int, default=defaults.max_model_len)
    parser.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs)
    parser.add_argument("--max-num-batched-tokens", type=int, default=defaults.max_num_batched_tokens)
    parser.add_argument("--watermark", type=float, default=rules.watermark)
    parser.add_argument("--long-prefill-token-threshold", type=int, default=rules.long_prefill_token_threshold)
    parser.add_argument("--scheduler-reserve-full-isl", action=switch, default=rules.scheduler_reserve_full_isl)
    parser.add_argument("--enable-prefix-caching", action=switch, default=rules.enable_prefix_caching)
    parser.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default=ENGINE_SCHEDULING)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--profile", choices=sorted(PROFILES), default=defaults.profile)
    return parser


def _num_blocks(found: argparse.Namespace) -> int:
    """Return the usable blocks: as asked, else what the profile's memory holds, else a default."""
    if found.num_gpu_blocks_override is not None:
        # vLLM's number counts the null block, which holds nothing.
        return int(found.num_gpu_blocks_override) - 1
    blocks = PROFILES[found.profile].num_blocks
    if blocks is None:
        return SimulatedSettings().num_blocks
    return blocks * BLOCK_SIZE // int(found.block_size)
