"""Runs the gateway: `python -m services.gateway [--flags]`."""

from __future__ import annotations

import sys
from functools import partial

from services.config_reading import load_settings
from services.gateway.service import serve
from services.gateway.settings import GatewaySettings
from services.life import live
from services.logs import start_logging


def main() -> int:
    """Read the settings, serve until SIGTERM, return the exit status."""
    settings = load_settings(GatewaySettings, "penstock gateway")
    start_logging(settings.log_level, settings.log_format)
    return live("gateway", settings, partial(serve, settings))


if __name__ == "__main__":
    sys.exit(main())
