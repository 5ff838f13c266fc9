"""A process of the benchmark: reads commands as lines of JSON, answers each with one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

Command: TypeAlias = Callable[..., Awaitable[dict[str, Any]]]

PROMPT_BYTES = 1024
"""Of every request: a short conversation."""

BATCH = 512
"""Messages that go into one frame, pipeline or fetch, on all three systems."""


async def serve(commands: dict[str, Command]) -> None:
    """Say that the process is ready, then carry out commands until standard input ends."""
    say({"ready": True})
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        command = json.loads(line)
        say(await commands[command.pop("do")](**command))


def say(answer: dict[str, Any]) -> None:
    """Write one answer."""
    print(json.dumps(answer), flush=True)


def prompt(number: int) -> str:
    """Return a prompt of PROMPT_BYTES, unlike that of any other number from its first bytes on."""
    return f"{number:08d} ".ljust(PROMPT_BYTES, "lorem ipsum "[number % 12])
