"""What deleted rows leave in RocksDB's families, and compactions that end it.

Of bodies that is disk space. Of small rows it is the time of whoever reads them in order: a deleted row is passed over
one by one, without letting go of the interpreter's lock, until a compaction has met it; and RocksDB begins none while
the family has less than four new table files, so of an idle queue never.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import rocksdict

from services.queue.core.effects import Write
from services.queue.core.records import FAMILIES
from services.queue.storage.reclaim import REST, Room, Step, Usage, is_walk_long, search_rest_s, step_for
from services.queue.storage.rocksdb_options import BODIES, PIECE_BYTES, WALKED
from services.queue.storage.spared import Spared, table_files

log = logging.getLogger(__name__)

_COUNT: Final = re.compile(r"# (entries|deletions)=(\d+)")

_COMPACTED_S: Final = re.compile(r"^ *(?:Low|Bottom) .* (\d+\.\d+)(?: +\S+){7} *$", re.MULTILINE)
"""In the lines of RocksDB's threads for compactions: the column Comp(sec), which seven others follow."""


class _Pass(NamedTuple):
    """A compaction of a whole family, range by range."""

    start: bytes | None
    """The key from which on it has still to be made, None for all."""
    deleted_before: int
    """Rows deleted until it began. What was deleted since may lie before `start`, where it does not look any more."""
    errors: int
    """Counted until then."""
    is_forced: bool
    """Whether rows that nothing lies below are written anew too."""


class _Deleted:
    """Counts the rows a store deletes, by family: what is written meanwhile counts as deleted, and as not yet."""

    def __init__(self) -> None:
        self._begun = dict.fromkeys(FAMILIES, 0)
        self._done = dict(self._begun)

    def begin(self, writes: Sequence[Write]) -> None:
        """Count those of `writes`, which are about to be made. One thread at a time, as `end`."""
        for write in writes:
            if write.value is None:
                self._begun[write.family] += 1

    def end(self) -> None:
        """Note that all are made which have begun."""
        self._done = dict(self._begun)

    def before(self, name: str) -> int:
        """Return how many rows of a family are deleted for certain."""
        return self._done[name]

    def since(self, name: str, before: int) -> int:
        """Return how many more may be by now."""
        return self._begun[name] - before


def _upper_bytes(files: list[dict[str, Any]], base: int) -> int:
    """Return the size of the files in level 0 and of those they overlap in level `base`, where they go."""
    upper = [file for file in files if file["level"] == 0]
    if not upper:
        return 0
    first, last = min(file["start_key"] for file in upper), max(file["end_key"] for file in upper)
    lower = [file for file in files if file["level"] == base]
    met = [file for file in lower if file["start_key"] <= last and file["end_key"] >= first]
    return sum(file["size"] for file in (*upper, *met))


def _options(name: str, is_forced: bool, is_alone: bool) -> Any:
    options = rocksdict.CompactOptions()
    # Those of other families go on, unless room is short: it is counted for one, and RocksDB begins some by itself.
    options.set_exclusive_manual_compaction(is_alone)
    if is_forced:
        forced = rocksdict.BottommostLevelCompaction
        options.set_bottommost_level_compaction(forced.force() if name in BODIES else forced.force_optimized())
    return options


class Space:
    """Gives back what deleted rows leave, piece by piece. One thread at a time, but for `give_way`."""

    def __init__(
        self,
        families: dict[str, Any],
        spared: Spared,
        errors: Callable[[], int],
        lend: Callable[[], bool] = lambda: False,
    ) -> None:
        """Look after `families`, all but what is `spared`; while they are closed it is empty, and calls raise KeyError.

        `errors` counts what goes wrong in RocksDB's own threads: the binding does not say that a compaction failed.
        `lend` gives the reserve up for a step that needs it, and says whether there was one.
        """
        # Never a family by itself: the lock of the directory goes when the last handle does.
        self._families = families
        self._spared = spared
        self._errors = errors
        self._clock = time.monotonic
        self.deleted = _Deleted()
        """Whoever writes to the families tells it."""
        self._settled = dict.fromkeys((*BODIES, *WALKED), 0)
        self._tuned: dict[str, dict[str, str]] = {name: {} for name in BODIES}
        self._lend = lend
        self._turns = [*BODIES, *WALKED]
        """Who comes first: whoever was compacted last is the last."""
        self._begun: dict[str, _Pass] = {}
        """Passes that gave way before their end."""
        self._rested_s = dict.fromkeys(BODIES, 0.0)
        """By the clock, when a family has rested after what was compacted there."""
        self._search_rest_s = dict.fromkeys(BODIES, 0.0)
        """How long it rests after a search, by what the last ones found."""
        self._waiting = set[str]()
        """Families whose compactions do not fit into what is free, which is told."""
        self._gives_way = False
        self._has_piece = False
        """Whether a piece has been compacted since that was said to begin: a write may wait for it."""
        self.compacted_s = 0.0
        """How long the compactions took that were asked for, all together."""

    def let_log_go(self, free_bytes: int) -> None:
        """Flush every family, if there is room for what they have in memory: nothing then needs the log."""
        if sum(self._number(name, "cur-size-all-mem-tables") for name in self._families) <= free_bytes:
            for name in tuple(self._families):
                self._families[name].flush(True)

    def give_way(self) -> None:
        """End what `reclaim` does, after the piece that is being compacted: a write has to wait. From any thread."""
        self._gives_way = True

    def reclaim(self, bound_bytes: int, room: Room) -> int:
        """Do what `step_for` says for each family of bodies, and compact those where `is_walk_long`.

        Return the bytes of the bodies' files that are gone. Blocks meanwhile.
        """
        self._gives_way, self._has_piece, freed = False, False, 0
        for name in tuple(self._turns):
            if self._has_given_way():
                break  # those behind are first at the next look
            if name in self._spared.families:
                continue
            if name in BODIES:
                freed += self._reclaim(name, bound_bytes, room)
            else:
                self._shorten_walk(name, room)
        return freed

    def _shorten_walk(self, name: str, room: Room) -> None:
        usage = self._usage(name)
        if any(is_walk_long(usage, part) for part in room.parts()):
            # Forced: else rows that nothing lies below are only handed down, deleted as they are.
            self._compact(name, True, room.is_low)

    def _reclaim(self, name: str, bound_bytes: int, room: Room) -> int:
        usage = self._usage(name)
        step, part = self._choose(name, usage, bound_bytes, room)
        if step is Step.NOTHING or (part.is_lent and not self._lend()):
            return 0
        self._families[name].flush(True)
        usage, before = self._usage(name), self._file_bytes(name)
        if not usage.fits(part):
            return 0  # with what was in memory
        if step is Step.RELOCATE:
            took_s = self._relocate(name, usage, part, room.is_low)
        else:
            took_s = self._compact(name, False, room.is_low)
        rest_s = REST * took_s
        if step is Step.SEARCH:
            rest_s = max(rest_s, self._rest_of_search_s(name, usage.living_bytes - self._usage(name).living_bytes))
        self._rested_s[name] = max(self._rested_s[name], self._clock() + rest_s)
        return max(0, before - self._file_bytes(name))

    def _choose(self, name: str, usage: Usage, bound_bytes: int, room: Room) -> tuple[Step, Room]:
        """Return the step that is due and has room, and in what part; where none has say so in the log once."""
        is_rested = self._clock() >= self._rested_s[name]
        steps = [(step_for(usage, bound_bytes, part, is_rested), part) for part in room.parts()]
        due = [(step, part) for step, part in steps if step is not Step.NOTHING]
        fits = [(step, part) for step, part in due if usage.fits(part)]
        if due and not fits and name not in self._waiting:
            log.warning("%s: what is deleted stays on the disk until there is more room, or more is deleted: to compact"
                        " it takes %d MiB for a while, too much of %d",
                        name, usage.piece_bytes >> 20, room.step_bytes >> 20)  # fmt: skip
        if due:
            (self._waiting.discard if fits else self._waiting.add)(name)
        fits = [each for each in fits if not each[1].is_lent] or fits
        moves = (each for each in fits if each[0] is Step.RELOCATE)  # which compacts as well
        return next(moves, fits[0]) if fits else (Step.NOTHING, room)

    def _relocate(self, name: str, usage: Usage, room: Room, is_alone: bool) -> float:
        """Move what lives in the oldest blob files; return the seconds that took.

        Where level 0 makes its first compaction too large it is compacted by itself before, and what that leaves is
        looked at before anything new is there.
        """
        took_s, share = 0.0, usage.relocated_share(room)
        if not share:
            took_s = self._compact(name, False, is_alone)
            usage = self._usage(name)
            share = 0.0 if self._has_given_way() else usage.relocated_share(room)
        if share:
            pieces = usage.pieces(share)
            self._tune(name, share / pieces)
            took_s += self._compact(name, True, is_alone, pieces)  # each time the oldest blob files are others
            self._tune(name, 0.0)
        return took_s

    def _has_given_way(self) -> bool:
        return self._gives_way and self._has_piece

    def _rest_of_search_s(self, name: str, found_bytes: int) -> float:
        """Note what a search found; return the seconds until the next: none where it gave way, so that it goes on."""
        has_ended = name not in self._begun
        self._search_rest_s[name] = search_rest_s(self._search_rest_s[name], found_bytes, has_ended)
        return self._search_rest_s[name] if has_ended else 0.0

    def _compact(self, name: str, is_forced: bool, is_alone: bool, times: int = 1) -> float:
        """Compact a family so often, unless a write has to wait, but one piece at least.

        Return the seconds that took, without the flush RocksDB makes before each: on a disk that is busy that is most.
        """
        self._turns.remove(name)
        self._turns.append(name)
        self._gives_way, self._has_piece = False, False  # what waited until here waited for a flush
        before_s = self._compacted_s(name)
        all(self._compact_once(name, is_forced, is_alone) for _ in range(times))
        took_s = self._compacted_s(name) - before_s
        self.compacted_s += took_s
        return took_s

    def _compact_once(self, name: str, is_forced: bool, is_alone: bool) -> bool:
        """Compact a family in ranges of keys, or the rest of it where the last time, of the same kind, gave way.

        Return whether that came to its end, and note then how many deletions it leaves: of those left at its end all
        but as many as came since it began.
        """
        this, options = self._begin(name, is_forced), _options(name, is_forced, is_alone)
        for start, end in self._ranges(name, this.start):
            if self._has_given_way():
                self._begun[name] = this._replace(start=start)
                return False
            self._families[name].compact_range(start, end, options)
            self._has_piece = True
        if self._errors() == this.errors:  # else it is tried again
            left = self._usage(name).deletions
            self._settled[name] = max(0, left - self.deleted.since(name, this.deleted_before))
        return True

    def _begin(self, name: str, is_forced: bool) -> _Pass:
        begun = self._begun.pop(name, None)
        if begun and begun.is_forced == is_forced:
            return begun
        return _Pass(None, self.deleted.before(name), self._errors(), is_forced)

    def _ranges(self, name: str, start: bytes | None) -> Iterator[tuple[bytes | None, bytes | None]]:
        """Yield ranges of keys from `start` on, both ends included, which cut between table files where they hold
        `PIECE_BYTES`.
        """
        first, size_bytes = start or b"", 0
        for file in sorted(self._table_files(name), key=lambda file: file["end_key"]):
            if file["end_key"] < first:
                continue
            size_bytes += file["size"]
            if size_bytes >= PIECE_BYTES:
                yield start, file["end_key"]
                start, size_bytes = file["end_key"] + b"\0", 0
        yield start, None

    def _table_files(self, name: str) -> list[dict[str, Any]]:
        ours = table_files(self._families[name])
        return [file for file in self._families[name].live_files() if int(file["name"][1:-4]) in ours]

    def _tune(self, name: str, share: float) -> None:
        """Have compactions move the oldest `share` of the blob files.

        Only what changes is set: RocksDB writes a file with all options each time.
        """
        wanted = {
            "enable_blob_garbage_collection": str(share > 0).lower(),
            "blob_garbage_collection_age_cutoff": f"{min(1.0, share + 1e-6):.6f}",  # RocksDB rounds down to files
        }
        if wanted != self._tuned[name]:
            self._families[name].set_options(wanted)
            self._tuned[name] = wanted

    def _usage(self, name: str) -> Usage:
        entries, deletions = self._in_tables(name)
        all_deletions = deletions + self._deleted_in_memory(name)
        self._settled[name] = min(self._settled[name], all_deletions)  # RocksDB has compacted by itself
        garbage_bytes = self._number(name, "live-blob-file-garbage-size")
        return Usage(
            rows=max(0, entries - deletions),
            deletions=all_deletions,
            table_bytes=self._number(name, "live-sst-files-size"),
            blob_bytes=self._number(name, "live-blob-file-size"),
            blob_files=self._number(name, "num-blob-files"),
            garbage_bytes=garbage_bytes,
            moves_blobs=not self._spared.blobs,
            settled=self._settled[name],
            upper_bytes=self._upper_bytes(name) if garbage_bytes or all_deletions else 0,
        )

    def _upper_bytes(self, name: str) -> int:
        return _upper_bytes(self._table_files(name), self._number(name, "base-level"))

    def _in_tables(self, name: str) -> tuple[int, int]:
        """Return how many entries table files have, and how many of those are deletions."""
        tables = dict(_COUNT.findall(self._families[name].property_value("rocksdb.aggregated-table-properties") or ""))
        return int(tables.get("entries", 0)), int(tables.get("deletions", 0))

    def _compacted_s(self, name: str) -> float:
        stats = self._families[name].property_value("rocksdb.cfstats-no-file-histogram") or ""
        return sum(map(float, _COMPACTED_S.findall(stats)))

    def _deleted_in_memory(self, name: str) -> int:
        return self._number(name, "num-deletes-active-mem-table") + self._number(name, "num-deletes-imm-mem-tables")

    def _file_bytes(self, name: str) -> int:
        return self._number(name, "total-sst-files-size") + self._number(name, "total-blob-file-size")

    def _number(self, name: str, what: str) -> int:
        return self._families[name].property_int_value(f"rocksdb.{what}") or 0
