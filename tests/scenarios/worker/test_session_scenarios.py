"""Transcripts of the session: what it is told, and every effect it answers with.

A line `12ms Granted request_id=r1 …` tells the session a message at that time;
the indented lines below are all of its effects, in order. A line that begins
with `#` is for the reader.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from services.core.drain import Drain
from services.core.value import Value, fields
from services.worker.core import messages as m
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes

HERE = Path(__file__).parent
CORE = Path(__file__).parents[3] / "services/worker/core"
"""Not by a module's `__file__`: one that compiled code imports first is told a wrong one by mypyc."""

SIZES = Sizes(capacity_blocks=60, blocks_total=64, block_size=16, max_model_len=512)


def types_of_fields() -> dict[str, dict[str, Any]]:
    """Return the types of every message's fields, from the source: compiled classes do not know them all."""
    trees = [ast.parse((CORE / f"{name}.py").read_text()) for name in ("messages", "tokenizing", "values")]
    nodes = [node for tree in trees for node in tree.body]
    found: dict[str, dict[str, Any]] = {}
    for kind in [node for node in nodes if isinstance(node, ast.ClassDef)]:
        found[kind.name] = {name: eval(ast.unparse(hint), vars(m)) for name, hint in hints_of(kind) if hint}
    return found


def hints_of(kind: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the fields of a named tuple, or the parameters of a value."""
    for node in kind.body:
        if isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), node.annotation
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from ((argument.arg, argument.annotation) for argument in node.args.args)


TYPES = types_of_fields()


def transcript(text: str) -> list[str]:
    """Run the messages of a transcript; return it with the effects that happened."""
    session = Session(SIZES)
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            time, name, *fields = line.split()
            now_ns = int(time.removesuffix("ms")) * 1_000_000
            lines.extend(f"    {shown(effect)}" for effect in session.step(message(name, fields), now_ns))
    return lines


def message(name: str, fields: list[str]) -> m.Message:
    """Read a message; `a_b` in a text value stands for `a b`."""
    kind = getattr(m, name)
    hints = TYPES[name]
    values = dict(field.split("=", 1) for field in fields)
    made: m.Message = kind(**{key: value(hints[key], text) for key, text in values.items()})
    return made


def lease(text: str) -> m.Lease:
    request_id, attempt, token = text.split("/")
    return m.Lease(request_id, int(attempt), int(token))


def standing(text: str) -> m.Standing:
    model, chat, *sizes = text.split("/")
    return m.Standing(model, chat == "yes", *map(int, sizes))


def drain(text: str) -> Drain:
    version, wanted = text.split("/")
    return Drain(int(version), wanted == "yes")


READERS: dict[Any, Callable[[str], Any]] = {
    m.Lease: lease,
    m.Standing | None: standing,
    m.Met | None: lambda text: m.Met(*text.split("/")),
    Drain: drain,
    bool: {"yes": True, "no": False}.__getitem__,
}
"""What reads a value of a type that its own name does not."""


def value(kind: Any, text: str) -> Any:
    if kind in READERS:
        return READERS[kind](text)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(text)
    return text.replace("_", " ") if kind is str and "_" in text else kind(text)


def shown(effect: Any) -> str:
    said = fields(effect) if isinstance(effect, Value) else effect._asdict()
    return " ".join([type(effect).__name__, *(f"{k}={plain(v)}" for k, v in said.items())])


def plain(item: Any) -> str:
    if isinstance(item, m.Lease):
        return f"{item.request_id}/{item.attempt}/{item.fencing_token}"
    if isinstance(item, m.Holding):
        return f"{item.request_id}:{item.held_blocks}@{item.seq}"
    if isinstance(item, m.Ending):
        return "|".join(part for part in (item.kind.value, item.code, item.message, item.param) if part)
    if isinstance(item, Enum):
        return str(item.value)
    if isinstance(item, m.Credits | m.Standing):
        item = tuple(fields(item).values())
    if isinstance(item, tuple):
        return f"[{', '.join(map(plain, item))}]"
    return {True: "yes", False: "no"}[item] if isinstance(item, bool) else str(item)


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_the_session_does_what_the_transcript_says(path: Path) -> None:
    text = path.read_text()
    assert transcript(text) == text.splitlines()


def test_there_are_transcripts() -> None:
    assert len(list(HERE.glob("*.txt"))) >= 5
