"""What client and services agree on: how large a message, a request, a name and a part of a file may be, and how a
connection is kept and come back to.

All but one are Final: compiled modules hold the number itself. MAX_REQUEST_BYTES they look up, for tests of what is too
large set another one.
"""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""One gRPC frame. A 1M-token prompt as text is about 4 MiB, as token ids about 5 MiB; this leaves room for both."""

MAX_REQUEST_BYTES = 12 * 1024 * 1024
"""One encoded request, or one result; below MAX_MESSAGE_BYTES so that a delivered request fits a frame with its lease.
The queue refuses a larger one, and one beyond MAX_MESSAGE_BYTES does not even reach it."""

MAX_FRAME_MESSAGES: Final = 512
"""Messages in one frame: past a few hundred the cost per frame no longer shows beside the cost per message."""

TARGET_FRAME_BYTES: Final = 1024 * 1024
"""A frame is closed once it holds this much, so that frames of large prompts stay far below MAX_MESSAGE_BYTES."""

MAX_NAME_BYTES: Final = 512
"""Of any name: of tenant, idempotency key, model, batch, channel, worker, grant, and of trace headers. They are store
keys and are kept in memory, and a longer one may be more than a frame holds."""

PART_BYTES: Final = 1024 * 1024
"""Content of a part of a file. A part is one row and one call: large enough that a file of 200 MiB takes 200 syncs,
small enough that a commit with a few of them does not hold up the others."""

MAX_CURSOR: Final = 2**64 - 1
"""Largest cursor, after which a watch or a list goes on: what the protocol's number holds."""

KEEPALIVE_TIME_MS: Final = 20_000
"""Idle streams are probed this often, so that a vanished host is noticed without a TCP timeout of minutes: a watch may
be silent for hours. A service takes four times as many (`PING_INTERVAL_MS`), also while no call is open."""

KEEPALIVE_TIMEOUT_MS: Final = 10_000
"""A probe that the peer's kernel has not acknowledged for this long closes the connection: the host has vanished. A
process that is stopped is not noticed by it."""

PING_TIMEOUT_MS: Final = 30_000
"""A connection also ends when the peer's process has not answered a ping for so long: a keepalive probe, or one of
those by which gRPC measures how much a link holds. The answer comes behind what is under way before it, and before a
slow link that may be megabytes: 200 kB/s carry 6 MB in that time."""

BACKOFF_FIRST_S: Final = 0.05
"""First pause before a reconnect or a retry: a restarted service is back within a fraction of a second."""

BACKOFF_MOST_S: Final = 2.0
"""Longest pause between reconnects or retries, and of services the longest attempt after some: how long a returned peer
stays unnoticed."""

RESOLVE_MS: Final = 500
"""A peer's name is resolved at most this often. By gRPC's own default of 30,000 a peer that comes back under another
address, as a container does that is made anew, would stay unnoticed for so long, however short the pauses above are. A
name is resolved when a connection is lost or cannot be had, so peers that stay cost no look-ups."""
