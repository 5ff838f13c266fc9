"""Models that take what they know and nothing else, and that stop at the first item that is wrong.

pydantic notes every wrong item of a list and of an object, at some kilobytes each. A body of 16 MiB has room for
millions of them, and only the first is ever told.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails

PIECE = 100
"""Entries of a mapping that are checked together: of as many it is noted what is wrong."""

KINDS = {
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "must be a text or a list of texts, none of which is empty",
    "tool_choice": 'must be "none", "auto", "required", or {"type": "function", "function": {"name": …}}',
    "vllm_xargs": "must be an object of texts, numbers and lists of these",
}
"""Fields whose values may be of several kinds: of one that is of none pydantic tells what the first of them wants."""

T = TypeVar("T")


def _is_truth(given: Any) -> Any:
    if not isinstance(given, bool):
        raise ValueError(f"must be a truth value (got {repr(given)[:80]})")
    return given


OnlyFalse: TypeAlias = Annotated[Literal[False], BeforeValidator(_is_truth)]
"""False, and not 0, which a `Literal` takes for it."""

Items: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""A list; what comes after its first wrong item is not looked at."""


def _in_pieces(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    if not isinstance(given, dict) or len(given) <= PIECE:
        return check(given)
    checked: dict[Any, Any] = {}
    left = iter(given.items())
    while piece := dict(islice(left, PIECE)):
        checked.update(check(piece))
    return checked


Entries: TypeAlias = Annotated[dict[str, T], WrapValidator(_in_pieces)]
"""A mapping; what comes after the piece with its first wrong entry is not looked at."""


class Strict(BaseModel):
    """No unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field_is_enough(cls, given: Any) -> Any:
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields) + 1:
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in given if name not in known)
        return {name: value for name, value in given.items() if name in known or name == unknown}


def is_same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are equal and of one kind: to Python 0 is false, and 1 is true and 1.0."""
    return type(value) is type(other) and bool(value == other)


def complaint(problem: ErrorDetails) -> str:
    """Return what is wrong with the value of a field, and what it is where that is not said."""
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    shown = repr(problem.get("input"))
    text = KINDS.get(str(problem["loc"][0]), problem["msg"]) if problem["loc"] else problem["msg"]
    return f"{text} (got {shown if len(shown) <= 80 else shown[:77] + '...'})"
