"""Runs the queue service: `python -m services.queue [--flags]`."""

from __future__ import annotations

import sys
from functools import partial

from services.config_reading import load_settings
from services.life import live
from services.logs import start_logging
from services.queue.service import serve
from services.queue.settings import QueueSettings


def main() -> int:
    """Read the settings, serve until SIGTERM, return the exit status."""
    settings = load_settings(QueueSettings, "penstock queue")
    start_logging(settings.log_level, settings.log_format)
    return live("queue", settings, partial(serve, settings))


if __name__ == "__main__":
    sys.exit(main())
