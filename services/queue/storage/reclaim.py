"""When what deleted rows leave on the disk is to be given back, and how: the decision, by numbers alone.

RocksDB deletes a row by writing that it is gone. The row and its blob stay in their files until a compaction finds
both, and one begins only when enough has been *written*. A deletion is a few bytes, whatever it is about: a backlog of
large prompts that is answered would keep its disk space for hours, and a queue that refuses submits for want of room,
which writes nothing, for ever.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final, NamedTuple

from penstock.limits import MAX_MESSAGE_BYTES
from services.queue.storage.reserve import LAST_ROOM_BYTES
from services.queue.storage.rocksdb_options import BLOB_BYTES, PIECE_BYTES

TABLES_TO_DEAD: Final = 4
"""With room on the disk, at most so many bytes of table files are written anew for each byte that is dead."""

TABLES_TO_DEAD_IF_LOW: Final = 64
"""The same once room is short: a few rows are not worth gigabytes even then."""

BLOBS_TO_GARBAGE: Final = 2
"""With room on the disk blobs are moved from where there are at most so many bytes of them, dead or alive, for each
that is garbage."""

BLOBS_TO_GARBAGE_IF_LOW: Final = 16
"""The same once room is short: the oldest blobs, which are moved first, are those that have the least garbage."""

BLOBS_TO_GARBAGE_IF_FULL: Final = 64
"""The same once submits are refused."""

SHORT_BOUND_BYTES: Final = 1024 * 1024
"""Where room is short blobs are moved from so much garbage on, whatever the watermark: what is dead is all there is to
go on with."""

WORTH_THE_RESERVE_BYTES: Final = PIECE_BYTES
"""So much is to be dead for the reserve to be given up for it, while it is needed for nothing else."""

RELOCATED_SHARE: Final = 0.25
"""Of the blob files, the oldest: what lives in them is moved to new ones, piece by piece, where there is room."""

WALKED_AT_MOST: Final = 30_000
"""Deleted rows that a read may have to walk over before it comes to one that lives: some milliseconds, in which nobody
else has the interpreter."""

ROWS_TO_WALKED: Final = 8
"""So many rows at most are written anew for each deleted one that is no longer walked over."""

ROOM_SHARE: Final = 0.75
"""Of the free space, what a compaction may take for a while."""

ROOM_SHARE_IF_FULL: Final = 0.9
"""The same once submits are refused: little is written beside it, and what is not given back stays refused."""

REST: Final = 9.0
"""Times as long as it compacted nothing is: a tenth of the disk's time at most. What is flushed before is no part of
that: it would be soon anyway."""

SEARCH_REST_S: Final = 60.0
"""Between searches for what need not be dead: each writes what is in memory into files, however little that is."""

SEARCH_REST_AT_MOST_S: Final = 3600.0
"""The same after many in vain."""


class Step(Enum):
    """What to do with a family."""

    NOTHING = "nothing"
    COMPACT = "compact"
    """Flush, and have deletions meet their rows: files in which nothing lives go."""
    SEARCH = "search"
    """The same for what need not be dead."""
    RELOCATE = "relocate"
    """Besides, move what lives in the oldest blob files to new ones."""


class Room(NamedTuple):
    """What of the disk is free."""

    free_bytes: int
    is_low: bool = False
    """Whether that is little, so that whatever is dead counts."""
    is_full: bool = False
    """Whether that is too little to take submits."""
    kept_bytes: int = 0
    """What of it is not to be used."""
    reserve_bytes: int = 0
    """What is held in reserve besides."""
    is_lent: bool = False
    """Whether the reserve is counted as free, and is to be given up before it is used."""

    @property
    def step_bytes(self) -> int:
        """What a step may take of it for a while."""
        share = ROOM_SHARE_IF_FULL if self.is_full else ROOM_SHARE
        return int(share * max(0, self.free_bytes - self.kept_bytes))

    def parts(self) -> tuple[Room, ...]:
        """Return it as it is to be used, the first that does first: all of it only for what is worth it with room too,
        as submits may be refused meanwhile; and once they are, with the reserve but for the last room, in which no more
        than cancels and deletes are taken.
        """
        if self.kept_bytes:
            return (self, Room(self.free_bytes))
        if not self.is_full or not self.reserve_bytes:
            return (self,)
        free_bytes = self.free_bytes + self.reserve_bytes
        return (self, Room(free_bytes, self.is_low, True, LAST_ROOM_BYTES, is_lent=True))

    @property
    def blobs_to_garbage(self) -> int:
        """So many bytes of blobs at most may there be for each of garbage, if they are to be moved."""
        if self.is_full:
            return BLOBS_TO_GARBAGE_IF_FULL
        return BLOBS_TO_GARBAGE_IF_LOW if self.is_low else BLOBS_TO_GARBAGE


class Usage(NamedTuple):
    """What a family has on the disk."""

    rows: int
    """In table files, dead or alive."""
    deletions: int
    """That have not met their rows, in memory and in table files."""
    table_bytes: int
    blob_bytes: int
    blob_files: int
    garbage_bytes: int
    """Of the blob files: what compactions have found dead there."""
    moves_blobs: bool = True
    """Whether compactions may read blobs: not where one is damaged."""
    settled: int = 0
    """Of the deletions those that the last compaction left as they are: what they deleted is gone."""
    upper_bytes: int = 0
    """Of the table files those of level 0 and what they overlap where they go: one compaction may take them all. Of
    others it takes some `PIECE_BYTES`."""

    @property
    def row_bytes(self) -> float:
        """Mean size of a row on the disk."""
        return self.living_bytes / self.rows if self.rows else 0.0

    @property
    def living_bytes(self) -> int:
        """What no compaction has found dead."""
        return self.table_bytes + self.blob_bytes - self.garbage_bytes

    @property
    def unsettled(self) -> int:
        """Deletions that no compaction has looked at."""
        return max(0, self.deletions - self.settled)

    @property
    def piece_bytes(self) -> int:
        """What the largest of its compactions takes before what it replaces goes: all that lives at most."""
        alive = max(0.0, 1 - self.unsettled / max(1, self.rows))
        return min(int(alive * self.table_bytes), max(PIECE_BYTES, self.upper_bytes))

    def most_dead_bytes(self, deletions: int) -> int:
        """Return what so many deletions may be about, however small most rows are."""
        of_blobs = min(deletions * MAX_MESSAGE_BYTES, self.blob_bytes - self.garbage_bytes)
        return min(deletions * BLOB_BYTES, self.table_bytes) + of_blobs

    def fits(self, room: Room) -> bool:
        """Return whether there is room for a compaction that moves no blob."""
        return self.piece_bytes <= room.step_bytes

    def relocated_share(self, room: Room) -> float:
        """Share of the blob files that a compaction is to empty: one file at least; 0 if there is no room for that,
        or none may be.

        What it replaces goes only when it is done.
        """
        if not self.moves_blobs:
            return 0.0
        if not self.blob_bytes:
            return RELOCATED_SHARE
        one_file = 1 / max(1, self.blob_files)
        fits = (room.step_bytes - self.piece_bytes) / self.blob_bytes
        share = min(max(RELOCATED_SHARE, one_file), fits)
        return share if share >= one_file else 0.0

    def can_move(self, room: Room) -> bool:
        """Return whether there is room to move blobs, once what is in level 0 is compacted where it is in the way."""
        return self._replace(upper_bytes=0).relocated_share(room) > 0

    def pieces(self, share: float) -> int:
        """Return in how many compactions a share of the blob files is to be emptied, each of one file at least.

        Each writes the tables anew, so that it is to move as much as those are worth. What is garbage is not moved.
        """
        moved_bytes = min(share * self.blob_bytes, self.blob_bytes - self.garbage_bytes)
        piece_bytes = max(PIECE_BYTES, self.table_bytes / TABLES_TO_DEAD)
        return max(1, min(int(share * self.blob_files), math.ceil(moved_bytes / piece_bytes)))


def step_for(usage: Usage, bound_bytes: int, room: Room, is_rested: bool) -> Step:
    """Return what to do with a family.

    `bound_bytes`: what may be dead while there is room; `is_rested`: even what need not be dead may be looked for, as
    the last step and the last search are long enough ago.
    """
    least_bytes = usage.table_bytes / (TABLES_TO_DEAD_IF_LOW if room.is_low else TABLES_TO_DEAD)
    # To move blobs writes the tables anew as well.
    worth_bytes = min(bound_bytes, max(SHORT_BOUND_BYTES, least_bytes)) if room.is_low else bound_bytes
    if room.is_lent:
        least_bytes, worth_bytes = (max(WORTH_THE_RESERVE_BYTES, each) for each in (least_bytes, worth_bytes))
    moves = usage.garbage_bytes > 0 and room.blobs_to_garbage * usage.garbage_bytes >= usage.blob_bytes
    if moves and usage.garbage_bytes >= worth_bytes and usage.can_move(room):
        return Step.RELOCATE  # first: it compacts as well, which is always due where rows come and go without a pause
    dead_bytes = usage.unsettled * usage.row_bytes
    if dead_bytes > 0 and dead_bytes >= (least_bytes if room.is_low else max(bound_bytes, least_bytes)):
        return Step.COMPACT
    may_search = room.is_low and is_rested and not room.is_lent
    if may_search and usage.most_dead_bytes(usage.unsettled) >= max(1, least_bytes):
        return Step.SEARCH
    return Step.NOTHING


def search_rest_s(before_s: float, found_bytes: int, has_ended: bool) -> float:
    """Return how many seconds a family is not searched after a search that found so much dead, `before_s` before it.

    It is twice as long each time one has ended without as much as a largest row.
    """
    if found_bytes >= MAX_MESSAGE_BYTES:
        return SEARCH_REST_S
    return min(max(SEARCH_REST_S, 2 * before_s), SEARCH_REST_AT_MOST_S) if has_ended else before_s


def is_walk_long(usage: Usage, room: Room) -> bool:
    """Return whether a family that is read in the order of its keys is to be compacted for what is deleted there."""
    if room.is_lent or usage.table_bytes > room.step_bytes:
        return False
    return usage.unsettled >= max(WALKED_AT_MOST, usage.rows / ROWS_TO_WALKED)
