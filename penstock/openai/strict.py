"""Models that take what they know and nothing else, and that stop at the first item that is wrong.

pydantic notes every wrong item of a list and of an object, at some kilobytes each. A body of 16 MiB has room for
millions of them, and only the first is ever told.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

PIECE = 100
"""Entries of a mapping that are checked together: of as many it is noted what is wrong."""

T = TypeVar("T")

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
