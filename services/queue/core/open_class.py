"""What marks a class that interpreted ones may inherit from when it is compiled: those that simulations watch.

mypyc reads the decorator and forgets it; when the program runs it does nothing, and needs no package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_attributes):
        """Return the class as it is."""
        return lambda kind: kind


__all__ = ["mypyc_attr"]
