"""How RocksDB is set up: memory, the log, what goes to blob files."""

from __future__ import annotations

from typing import Any

import rocksdict

from services.queue.core.records import PARTS, PAYLOADS, RESULTS

WRITE_BUFFER_BYTES = 32 * 1024 * 1024
"""Of one family in memory: a few thousand requests between flushes, and a bound on replay at start-up."""

ALL_WRITE_BUFFERS_BYTES = 64 * 1024 * 1024
"""Of all families together. Else ten of them fill, each at its pace, up to 320 MiB: memory that grows for hours."""

CACHE_BYTES = 32 * 1024 * 1024
"""Of what is read from table files, all families together. Else each of a dozen has 32 MiB of its own, which fill, each
at its pace, for hours; most rows are read once, soon after they were written, and then from a write buffer."""

BLOB_BYTES = 4096
"""Payloads and results from this size on go to blob files, so that compaction does not copy them."""

MAX_WAL_BYTES = 256 * 1024 * 1024
"""Bounds the log that a start replays, which is what bounds the time of a start after a kill."""

INFO_LOGS_KEPT = 2
"""RocksDB's own text logs; one for this run and one for the run before."""


def database_options() -> Any:
    """Return the options of a database."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_db_write_buffer_size(ALL_WRITE_BUFFERS_BYTES)
    options.set_max_total_wal_size(MAX_WAL_BYTES)
    options.set_keep_log_file_num(INFO_LOGS_KEPT)
    return options


def family_options(name: str, cache: Any) -> Any:
    """Return the options of a column family that shares `cache`, a rocksdict.Cache, with others."""
    options = rocksdict.Options(raw_mode=True)
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    table = rocksdict.BlockBasedOptions()
    table.set_bloom_filter(10, False)
    table.set_block_cache(cache)
    options.set_block_based_table_factory(table)
    if name in {PAYLOADS, RESULTS, PARTS}:
        options.set_enable_blob_files(True)
        options.set_min_blob_size(BLOB_BYTES)
        options.set_enable_blob_gc(True)
    return options
