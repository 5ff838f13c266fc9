"""Iterations that ended badly do not look, when they are asked once more, as if all had come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from enum import Enum
from functools import wraps
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Literal, ParamSpec, TypeVar, cast

from penstock.errors import PenstockError, anew

P = ParamSpec("P")
T = TypeVar("T")

CUT_OFF = (
    "a step of this iteration was cancelled, which ended it: not all has come. Begin another one (of a batch with the "
    "last result's cursor), or let a late step go on, as asyncio.wait does and asyncio.wait_for does not"
)
"""What those hear who ask for more after a step was cancelled; Python's own generators say to them that all is over."""


class Mark(Enum):
    """What stands in the place of an item."""

    END = "after the last"
    LATE = "not there yet"


class Iteration(AsyncGenerator[T, None]):
    """What an asynchronous generator yields; once it has failed or was cut off, each further step raises that again."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        """Take the items from `items`, from which nobody else takes any."""
        self._items = cast("AsyncGeneratorType[T, None]", items)
        self._failure: Exception | None = None

    async def asend(self, value: None, /) -> T:
        """Return the next item. Raises what ended the iteration."""
        if self._failure is not None:
            raise anew(self._failure)
        try:
            return await self._items.asend(value)
        except StopAsyncIteration:
            raise
        except BaseException as error:
            if self._items.ag_frame is None:  # not where two ask at once, of whom one is refused
                self._failure = _again(error)
            raise

    async def athrow(self, *error: Any) -> T:
        """Raise an error where the iteration is."""
        return await self._items.athrow(*error)

    async def aclose(self) -> None:
        """End the iteration."""
        await self._items.aclose()


def told_again(method: Callable[P, AsyncGenerator[T, None]]) -> Callable[P, AsyncGenerator[T, None]]:
    """Have what a method returns be an `Iteration`."""

    @wraps(method)
    def iteration(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        return Iteration(method(*args, **kwargs))

    return iteration


class BoundedIteration(Iterator[T]):
    """What a generator yields, and TimeoutError for each LATE, after which it goes on; failures as in `Iteration`."""

    def __init__(self, items: Generator[T | Literal[Mark.LATE], None, None], late: str) -> None:
        """Take the items from `items`; `late` is what a TimeoutError says."""
        self._items = cast("GeneratorType[T | Literal[Mark.LATE], None, None]", items)
        self._late = late
        self._failure: Exception | None = None

    def __next__(self) -> T:
        """Return the next item. Raises TimeoutError, or what ended the iteration."""
        if self._failure is not None:
            raise anew(self._failure)
        try:
            item = next(self._items)
        except StopIteration:
            raise
        except BaseException as error:
            if self._items.gi_frame is None:
                self._failure = _again(error)
            raise
        if item is Mark.LATE:
            raise TimeoutError(self._late)
        return item

    def close(self) -> None:
        """End the iteration."""
        self._items.close()


def _again(error: BaseException) -> Exception:
    """Return what is raised after `error` has ended an iteration."""
    return anew(error) if isinstance(error, Exception) else PenstockError(CUT_OFF)
