"""Runs the gateway: `python -m services.gateway [--flags]`."""

from services.config_reading import load_settings
from services.gateway.server import serve
from services.gateway.settings import GatewaySettings
from services.logs import start_logging
from services.rpc.loop import run_service
from services.rpc.tls import security_of
from services.telemetry import start_metrics, start_telemetry


def main() -> None:
    """Read the settings and serve until SIGTERM."""
    settings = load_settings(GatewaySettings, "penstock gateway")
    start_logging(settings.log_level, settings.log_format)
    start_metrics(settings.metrics_listen, security_of(settings).context())
    telemetry = start_telemetry("gateway")
    try:
        run_service(serve(settings, telemetry))
    finally:
        telemetry.close()


if __name__ == "__main__":
    main()
