"""What messages and effects are: a few named fields, set once."""

from __future__ import annotations

from typing import Any, Self


class Value:
    """Base of what is said and never changed: equal to another of its kind whose fields are equal, printed by name.

    A named tuple would do as well, but compiled services make such an object, and read its fields, without a call
    into the interpreter, in a fifth of the time, and a request takes a hundred of them. A subclass has an `__init__`
    that sets every field from a parameter of the same name; nobody sets one afterwards, though nothing but this line
    forbids it.
    """

    def __eq__(self, other: object) -> bool:
        """Compare kind and fields."""
        return type(self) is type(other) and fields(self) == fields(other)

    def __hash__(self) -> int:
        """Return a hash of the fields."""
        return hash(tuple(fields(self).values()))

    def __repr__(self) -> str:
        """Show the fields by name, as a named tuple does."""
        return f"{type(self).__name__}({', '.join([f'{name}={value!r}' for name, value in fields(self).items()])})"

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """Let it be copied and pickled, which a compiled class cannot be by itself."""
        return type(self), tuple(fields(self).values())

    def replace(self, **changes: Any) -> Self:
        """Return another with these fields instead; raises TypeError if it has no field of a name."""
        return type(self)(**{**fields(self), **changes})


def fields(value: object) -> dict[str, Any]:
    """Return the fields of a value by name, in the order of its parameters."""
    kind: Any = type(value)
    names = getattr(kind, "__mypyc_attrs__", None)  # of a compiled class
    if names is None:
        code = kind.__init__.__code__
        names = code.co_varnames[1 : code.co_argcount]
    return {name: getattr(value, name) for name in names}
