"""Flags of `vllm serve` that are of its HTTP server and not of the engine, and what there is here in their place.

Who comes from there has them in scripts. vLLM's parser of engine arguments knows none of them, and says so only once
it has been imported.
"""

from __future__ import annotations

IN_PLACE = {
    "api-key": "a file of keys, which `penstock keys create` writes and PENSTOCK_KEYS names",
    "enable-prompt-tokens-details": "nothing, for cached tokens are always told",
    "host": "--listen HOST:PORT of `python -m services.gateway`; `penstock up` listens on the loopback alone",
    "port": "--base-port of `penstock up`, whose gateway is 5 above it, or --listen HOST:PORT of each service",
    "ssl-ca-certs": "PENSTOCK_TLS_CA",
    "ssl-certfile": "PENSTOCK_TLS_CERT",
    "ssl-keyfile": "PENSTOCK_TLS_KEY",
    "uvicorn-log-level": "PENSTOCK_GATEWAY_LOG_LEVEL",
}
"""By the flag's name: what to use."""


def wrong_here(name: str) -> str:
    """Return what is wrong with a flag, or an argument of a file, by this name; empty if it is none of these."""
    use = IN_PLACE.get(name.lstrip("-").replace("_", "-"))
    return f"is a flag of vLLM's HTTP server; in its place: {use}" if use else ""
