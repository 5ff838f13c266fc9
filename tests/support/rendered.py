"""Prompts as `ByteRenderer` renders them."""

from __future__ import annotations

from array import array


def bytewise(text: bytes) -> array[int]:
    """Return one token per byte."""
    return array("I", list(text))
