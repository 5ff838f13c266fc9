"""Runs the queue service: `python -m services.queue [--flags]`."""

from services.config_reading import load_settings
from services.logs import start_logging
from services.queue.service import serve
from services.queue.settings import QueueSettings
from services.rpc.loop import run_service
from services.rpc.tls import security_of
from services.telemetry import start_metrics


def main() -> None:
    """Read the settings and serve until SIGTERM."""
    settings = load_settings(QueueSettings, "penstock queue")
    start_logging(settings.log_level, settings.log_format)
    start_metrics(settings.metrics_listen, security_of(settings).context())
    run_service(serve(settings))


if __name__ == "__main__":
    main()
