"""How RocksDB is set up: memory, the log, what goes to blob files."""

from __future__ import annotations

from typing import Any

import rocksdict

from services.queue.core.records import COMPLETIONS, DEAD, EXPIRY, FILES, PARTS, PAYLOADS, RECORDS, RESULTS
from services.queue.storage.spared import Spared

BODIES = (PAYLOADS, RESULTS, PARTS)
"""Families whose rows may be large."""

WALKED = (COMPLETIONS, EXPIRY, DEAD, FILES, RECORDS)
"""Families that are read in the order of their keys while the queue serves, from where many rows may be deleted: by
sweeps, lists, and whoever follows a batch. Others of such rows are read so at a start alone."""

WRITE_BUFFER_BYTES = 32 * 1024 * 1024
"""Of one family in memory: a few thousand requests between flushes, and a bound on replay at start-up."""

ALL_WRITE_BUFFERS_BYTES = 64 * 1024 * 1024
"""Of all families together. Else ten of them fill, each at its pace, up to 320 MiB: memory that grows for hours."""

CACHE_BYTES = 32 * 1024 * 1024
"""Of what is read from table files, all families together. Else each of a dozen has 32 MiB of its own, which fill, each
at its pace, for hours; most rows are read once, soon after they were written, and then from a write buffer."""

BLOB_BYTES = 4096
"""Payloads and results from this size on go to blob files, so that compaction does not copy them."""

BLOB_FILE_BYTES = WRITE_BUFFER_BYTES
"""Of one blob file: no more than a flush writes. To empty one takes as much room, on a disk that is nearly full too."""

MAX_WAL_BYTES = ALL_WRITE_BUFFERS_BYTES
"""Of the log, beyond which the families that keep its oldest file from going are flushed. As much as write buffers may
hold: a longer log only waits for families that write little. It bounds the time of a start after a kill, which replays
the log, and the room that takes, since what is replayed is written once more: a quarter of the watermark by default, so
that neither a start on a nearly full disk nor what is in the log by itself runs into its end."""

PIECE_BYTES = 64 * 1024 * 1024
"""What one compaction of bodies writes anew, of tables and of blobs each: seconds on a slow disk, after which it can be
ended, and the room it takes before what it replaces goes. RocksDB's default for tables is 25 times that: deletions
scattered over all rows then have each compaction of a range of keys write whatever there is beside the range too. So
large, too, may the level grow that level 0 goes to: new tables go there all at once, with all they overlap."""

BACKGROUND_JOBS = 4
"""Threads of RocksDB: one for flushes, three for compactions. It uses more than one of the three where table files of
any family begin to gather, so that one long compaction holds up none of the others."""

STOP_AT_TABLES = 1024
"""Table files of a family that wait to be compacted, from which on the store takes no writes. What bodies fill are
blob files, whose table files are small, and each time the log is full every family has another one: RocksDB's default
of 36 comes after little more than a gigabyte. Writes are not slowed down before: RocksDB would do it by pauses, and
none are let be made (`batches.py`)."""

STOP_AT_BYTES = 256 * 1024 * 1024 * 1024
"""The same of bytes."""

INFO_LOGS_KEPT = 2
"""RocksDB's own text logs; one for this run and one for the run before, or two of this one."""

INFO_LOG_BYTES = 4 * 1024 * 1024
"""Of one of them, about a day of a queue that is idle. Without a bound it grows for as long as the queue runs."""


def database_options() -> Any:
    """Return the options of a database."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_max_background_jobs(BACKGROUND_JOBS)
    options.set_db_write_buffer_size(ALL_WRITE_BUFFERS_BYTES)
    options.set_max_total_wal_size(MAX_WAL_BYTES)
    options.set_keep_log_file_num(INFO_LOGS_KEPT)
    options.set_max_log_file_size(INFO_LOG_BYTES)
    return options


def family_options(name: str, cache: Any, spared: Spared) -> Any:
    """Return the options of a column family that shares `cache`, a rocksdict.Cache, with others.

    Where `spared` has a family not compacted RocksDB holds no write up for that, however many table files there are.
    """
    options = rocksdict.Options(raw_mode=True)
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    table = rocksdict.BlockBasedOptions()
    table.set_bloom_filter(10, False)
    table.set_block_cache(cache)
    options.set_block_based_table_factory(table)
    options.set_level_zero_slowdown_writes_trigger(STOP_AT_TABLES)
    options.set_level_zero_stop_writes_trigger(STOP_AT_TABLES)
    options.set_soft_pending_compaction_bytes_limit(STOP_AT_BYTES)
    options.set_hard_pending_compaction_bytes_limit(STOP_AT_BYTES)
    options.set_disable_auto_compactions(name in spared.families)
    if name in BODIES:
        options.set_enable_blob_files(True)
        options.set_min_blob_size(BLOB_BYTES)
        options.set_blob_file_size(BLOB_FILE_BYTES)
        options.set_max_compaction_bytes(PIECE_BYTES // 2)  # with its last file, which overlaps up to as much again
        options.set_max_bytes_for_level_base(PIECE_BYTES)
        options.set_target_file_size_base(PIECE_BYTES // 4)  # the first of a compaction's files may be beyond any bound
        options.set_enable_blob_gc(False)  # of itself RocksDB would move a quarter of all blobs in one go (`space.py`)
    return options
