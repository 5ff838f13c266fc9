"""What client and services agree on: how large a message, a request, a name and a part of a file may be.

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
