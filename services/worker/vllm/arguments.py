"""The engine's arguments as the worker's user gives them, read with vLLM's own parser."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from penstock.exits import EX_CONFIG
from services.worker.engine import ENGINE_SCHEDULING, ENGINE_WATERMARK
from services.worker.settings import PROGRAM
from services.worker.vllm.checks import NotServedError, Parsers, asked_reasoning_parser

CPU_BLOCK_SIZE = "32"
"""Tokens per block on CPU unless asked otherwise: vLLM's attention there needs a multiple of 32, and its own default
of 128 makes credits four times as coarse."""

CPU_KV_CACHE_GIB = "1"
"""KV cache on CPU if nothing says how large: vLLM would take nearly all of the machine's memory."""


NEAR = 0.8
"""Likeness from which on a flag is taken for a misspelt one: vLLM has hundreds, many of them alike."""


def fail(message: str, status: int) -> NoReturn:
    """Print one line and end the process."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    raise SystemExit(status)


def check_model_path(model: str) -> None:
    """Raise SystemExit(78) if `model` reads like a path and nothing is there; names of the hub pass."""
    looks_like_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if looks_like_path and not Path(model).expanduser().exists():
        fail(f"--model: there is nothing at {model}", EX_CONFIG)


def asked_parsers(tool_parser: str, found: Any) -> Parsers:
    """Return the parsers that are asked for, `found` being the engine's arguments.

    Raises SystemExit(78) if vLLM has none of a name, or has two that cannot work together.
    """
    try:
        parsers = Parsers(tool_parser, asked_reasoning_parser(found))
    except NotServedError as error:
        fail(f"the engine's arguments do not fit: {error}", EX_CONFIG)
    if not any(parsers):
        return parsers
    from services.worker.vllm.parsing import parser_class

    flags = {"--tool-call-parser": Parsers(tools=parsers.tools), "--reasoning-parser": parsers._replace(tools="")}
    for flag, one in flags.items():
        try:
            parser_class(*one)
        except TypeError:
            fail(f"{flag}: vLLM has no parser called {one.tools or one.reasoning!r}", EX_CONFIG)
    try:
        parser_class(*parsers)
    except TypeError as error:
        fail(f"--tool-call-parser, --reasoning-parser: {first_line(error)}", EX_CONFIG)
    return parsers


def _nearest(message: str, known: list[str]) -> str:
    """Return which flag was meant, if what the parser says names an unknown one that is near."""
    unknown = re.findall(r"(?<!\S)--[\w.-]+", message) if message.startswith("unrecognized arguments") else []
    near = [close[0] for flag in unknown if (close := get_close_matches(flag, known, 1, NEAR))]
    return f"; did you mean {near[0]}?" if near else ""


def parse_engine_arguments(arguments: list[str], on_cpu: bool, with_place: Callable[[str], str] = str) -> Any:
    """Return the arguments as vLLM's parser reads them.

    Raises SystemExit(78) naming the one that is wrong, and `with_place` where it was given.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from services.worker.vllm import adapters, templates

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        """vLLM's parser, with errors on one line."""

        def error(self, message: str) -> NoReturn:
            placed = with_place(message)
            text = f"engine arguments of the command line: {message}" if placed == message else placed
            fail(text + _nearest(message, list(self._option_string_actions)), EX_CONFIG)

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="worker", add_help=False, allow_abbrev=False))
    adapters.add_flag(parser)
    templates.add_flags(parser)
    # A request is booked as many blocks as one kind of KV cache takes: sliding windows are then cached whole.
    parser.set_defaults(
        watermark=ENGINE_WATERMARK, scheduling_policy=ENGINE_SCHEDULING, disable_hybrid_kv_cache_manager=True
    )
    found = parser.parse_args(arguments)
    if on_cpu:
        from vllm.utils.cpu_resource_utils import get_visible_memory_node

        if found.block_size is None:
            found.block_size = int(CPU_BLOCK_SIZE)
        if found.kv_cache_memory_bytes is None:
            # Also with a number of blocks given: vLLM checks its share of the memory first.
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_CACHE_GIB)
        if found.tensor_parallel_size > len(get_visible_memory_node()):
            # vLLM binds each rank's threads to the cores of a memory node of its own; with fewer it does not start.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return found


def first_line(error: BaseException) -> str:
    """Return the sentence of an error that says the most, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        # pydantic: a heading, the field if it is one field's, then the complaint between its own words.
        of_field = len(lines) > 2 and " " not in lines[1]
        complaint = lines[1 + of_field].removeprefix("Value error, ").partition(" [type=")[0]
        return f"{lines[1]}: {complaint}" if of_field else complaint
    return lines[0] if lines else type(error).__name__
