"""Runs the credit scheduler: `python -m services.scheduler [--flags]`."""

from __future__ import annotations

import sys
from functools import partial

from services.config_reading import load_settings
from services.life import live
from services.logs import start_logging
from services.scheduler.service import serve
from services.scheduler.settings import SchedulerSettings


def main() -> int:
    """Read the settings, serve until SIGTERM, return the exit status."""
    settings = load_settings(SchedulerSettings, "penstock scheduler")
    start_logging(settings.log_level, settings.log_format)
    return live("scheduler", settings, partial(serve, settings))


if __name__ == "__main__":
    sys.exit(main())
