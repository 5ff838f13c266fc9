"""The batch: lines in OpenAI's format, and what a fault-free run answers to each."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.support.batch_lines import WORDS, chat, completion, text_of

CONTENT_SEED = 20_231_116
"""Of the prompts. They do not depend on the seed of the schedule, so that one fault-free run serves all schedules."""


def bodies(distinct: int, most_tokens: int) -> list[tuple[str, int, bool]]:
    """Return `distinct` prompts, each with its `max_tokens` and whether it is a chat. No two prompts are equal."""
    chance = random.Random(CONTENT_SEED)
    found = []
    for number in range(distinct):
        words = " ".join(chance.choices(WORDS, k=chance.randint(3, 30)))
        found.append((f"{number} {words}", chance.randint(max(most_tokens // 8, 1), most_tokens), number % 2 == 1))
    return found


def batch(count: int, distinct: int, most_tokens: int) -> list[dict[str, Any]]:
    """Return `count` greedy lines; line i asks what line i modulo `distinct` asks."""
    asked = bodies(distinct, most_tokens)
    made = []
    for number in range(count):
        prompt, max_tokens, is_chat = asked[number % distinct]
        make = chat if is_chat else completion
        made.append(make(f"line-{number}", prompt, max_tokens=max_tokens))
    return made


def write_parts(lines: Sequence[dict[str, Any]], lanes: int, parts: int, directory: Path) -> list[list[Path]]:
    """Write the lines as `parts` files for each of `lanes` clients; return the files by lane.

    Many files, one after the other, make new submits happen all through the run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files: list[list[Path]] = [[] for _ in range(lanes)]
    for number in range(lanes * parts):
        share = lines[number :: lanes * parts]
        path = directory / f"in-{number:02}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in share))
        files[number % lanes].append(path)
    return files


def texts(outputs: Sequence[Path]) -> dict[str, str]:
    """Return the answered text of each line of complete output files."""
    found = {}
    for path in outputs:
        with path.open() as file:
            for row in file:
                line = json.loads(row)
                found[line["custom_id"]] = text_of(line)
    return found


def name_of(lines: Sequence[dict[str, Any]], flags: Sequence[str]) -> str:
    """Return a name for what these lines are answered with by an engine with these flags."""
    return sha256(json.dumps([lines, list(flags)]).encode()).hexdigest()[:16]
