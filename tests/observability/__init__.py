"""Dashboard and alerts against a running stack and a real Prometheus; `make observability-check`."""
