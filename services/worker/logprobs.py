"""Log probabilities as they go over the wire, encoded as they come from the engine.

A result may have a million of them. To make messages of all and encode those at its end would hold up everything else
for seconds, and only then would its size be known; put down as bytes, a step's worth at a time, they are joined in
milliseconds. Deltas and the result have the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from penstock.request.v1 import request_pb2 as pb
from services.rpc.encoding import fixed_tag, length_tag, number_field, number_tag, varint, wrapped
from services.worker.engine import TokenProbability

_TOKEN_ID: Final = number_tag(pb.TokenLogprob, "token_id")
_TOKEN: Final = length_tag(pb.TokenLogprob, "token")
_LOGPROB: Final = fixed_tag(pb.TokenLogprob, "logprob")
_RANK: Final = number_tag(pb.TokenLogprob, "rank")
_TOP: Final = length_tag(pb.TokenLogprob, "top")

_DOUBLE: Final = struct.Struct("<d")

_ZERO: Final = _DOUBLE.pack(0.0)
"""What is not written; minus zero is."""

LEAST_ENTRY_BYTES = 15
"""Of a log probability among a token's likeliest: 2 before it, 2 for an id, 9 for the number and 2 for the rank."""


def least_prompt_logprobs(tokens: int, top: int) -> int:
    """Return the bytes that a result has at least of a prompt of `tokens`, with the `top` likeliest of each but one.

    The token's own entry and one of the likeliest count for nothing: of a certain one the number, 0, is not written.
    """
    return max(0, tokens - 1) * max(0, top - 1) * LEAST_ENTRY_BYTES


def encoded(entry: TokenProbability) -> bytes:
    """Return an encoded TokenLogprob with its length before it, which the tag of any field may precede."""
    content = _content(entry)
    if entry.top:
        content += b"".join([wrapped(_TOP, _content(likely)) for likely in entry.top])
    return varint(len(content)) + content


def _content(entry: TokenProbability) -> bytes:
    number = _DOUBLE.pack(entry.logprob)
    content = number_field(_TOKEN_ID, entry.token_id)
    if entry.token:
        # Half a surrogate pair, which UTF-8 cannot say, is no reason to fail a run: its id says which token it is.
        content += wrapped(_TOKEN, entry.token.encode(errors="replace"))
    if number != _ZERO:
        content += _LOGPROB + number
    return content + number_field(_RANK, entry.rank)


def fields(tag: bytes, entries: Sequence[bytes]) -> bytes:
    """Return a field for each of the encoded entries, one after the other."""
    return tag.join([b"", *entries])


def size_bytes(entries: Sequence[bytes]) -> int:
    """Return what encoded entries take as fields of one-byte tags, as those of results and deltas are."""
    return sum(map(len, entries)) + len(entries)
