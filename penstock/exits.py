"""Exit statuses of the command and of the services, most of them those of sysexits.h: scripts can tell them apart."""

from __future__ import annotations

EX_INCOMPLETE = 1
"""The command did its work, but something it was asked for has no good answer (unknown id, request not completed)."""

EX_FOUND = 1
"""A verification of a store did its work, and found something."""

EX_UNWELL = 1
"""A health check found its service unwell: the status by which Docker takes a container for unhealthy."""

EX_USAGE = 2
"""Wrong options or arguments."""

EX_PROBE_USAGE = 64
"""Wrong arguments of a health check; of those Docker keeps 2 for itself."""

EX_NO_INPUT = 66
"""The input file cannot be read."""

EX_UNAVAILABLE = 69
"""A service does not answer, or a port or data directory cannot be had."""

EX_SOFTWARE = 70
"""A service has failed, or what it runs: a worker's engine or tokenizer."""

EX_CANNOT_WRITE = 73
"""An output file cannot be written."""

EX_TEMPFAIL = 75
"""A quota is used up; the same command may succeed later."""

EX_NOPERM = 77
"""No API key, or one that is not good for this."""

EX_CONFIG = 78
"""The configuration is wrong."""

EX_INTERRUPTED = 130
"""Ctrl-C."""
