"""Flags of `vllm serve` that have no place here, and what there is in theirs.

Who comes from there has them in scripts. Of those of its HTTP server vLLM's parser of engine arguments knows none, and
says so only once it has been imported.
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
"""Of the HTTP server, by the flag's name: what to use."""

ADMISSION = {
    "max-num-queued-reqs": "nothing, for requests wait in the queue until a worker has blocks for them",
    "max-num-queued-tokens": "a channel's guaranteed_share or weight for what is not to wait behind other requests",
}
"""Of vLLM's own admission, likewise: what it turns away has been accepted here, and would burn its attempts."""


def wrong_here(name: str) -> str:
    """Return what is wrong with a flag, or an argument of a file, by this name; empty if it is none of these."""
    plain = name.lstrip("-").replace("_", "-")
    if plain in IN_PLACE:
        return f"is a flag of vLLM's HTTP server; in its place: {IN_PLACE[plain]}"
    return f"turns away what was accepted; in its place: {ADMISSION[plain]}" if plain in ADMISSION else ""
