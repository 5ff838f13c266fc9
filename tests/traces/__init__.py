"""Traces of thousands of requests whose workers are killed, over a real OTLP receiver; `make trace-check`."""
