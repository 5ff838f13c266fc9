"""Compile the services' inner modules with mypyc, if PENSTOCK_COMPILE=1 is set; everything else is in pyproject.toml.

Without the variable Penstock is pure Python and needs no compiler. With it, a wheel holds an extension module beside
each source file of `COMPILED`; Python takes that instead of the source. Never build it in place: `make compiled`
builds in `build/`, so that no stale extension hides a source (docs/adr/0012-compiled-services.md).
"""

from __future__ import annotations

import os
import sys

from setuptools import setup

COMPILED: dict[str, str] = {
    "services/core": "drain value",
    "services/rpc": "backoff encoding fault fields first_look outbox peer_stream streams",
    "services/queue/core": """ages audit book change effects entry lifecycle lines machine messages offers ordered
        quotas records workers""",
    "services/queue": "committer items letters outlet payloads rights speaker wire",
    "services/queue/files": "changes listing rows shelf",
    "services/queue/storage": "batches health loading rocksdb_errors rocksdb_store spot_check store synced",
    "services/queue/submits": "intake torn turns validate",
    "services/queue/watch": "batch_log hub",
    "services/scheduler/core": """audit backlog counters drains entry fleet geometry hopeless ledger lifecycle
        machine messages roster snapshot standby standing waiting windows""",
    "services/scheduler/core/admission": """bookings estimate forecast lead lengths margin policies policy predictive
        prompts recompute""",
    "services/scheduler/core/sharing": """arbiter aside beyond bids channel claims deposits guarantees heads
        hold_time holds kept largest lately line longest older openings places precedence reach
        rules savings share tiers widest""",
    "services/scheduler": "links runner wire",
    "services/worker/core": """audit engine_view entry lifecycle messages peers prompt_line reservations session sizing
        standing token_news tokenizing values watchdog""",
    "services/worker": "alarm completions engine forms links logprobs outputs pages run runner wire",
}
"""Modules by directory: those a request passes through. What is left out, and why:

- async generators, which mypyc leaves to the interpreter: servicers, `strict`, `watching`, `following`, `reading`,
  `frames`, `reader`, and `windows` and `rpc/waiters`, of which the servicers are made;
- pydantic models and what only reads them: `settings`, `services/config*`;
- code that runs at the start, at the end, every few seconds, or for an operator: `__main__`, `life`, `service`,
  `admin`, `backup`, `opening`, `recovery`, `migration`, `lives`, `reclaim`, `reclaimer`, `reserve`, `space`, `verify`,
  `metrics`, `tracing`;
- `worker/tokenizer`, `worker/nursery`: what a forked child does with pickles fails without a word when it is compiled;
- engines (vLLM is Python; the simulated one stands for it) and the gateway, which is a client.
"""


def modules() -> list[str]:
    """Return the path of every compiled module, "services/queue/wire.py"."""
    return [f"{directory}/{name}.py" for directory, names in COMPILED.items() for name in names.split()]


def groups() -> list[tuple[list[str], str | None]]:
    """Return the modules of each service, and of what they share, and the name of the library that holds their code.

    A library each: a process loads its own and the shared ones, and a changed service is compiled alone.
    """
    services: dict[str, list[str]] = {}
    for path in modules():
        services.setdefault(path.split("/")[1], []).append(path)
    return [(paths, f"services.{service}.compiled") for service, paths in services.items()]


def extensions() -> list[object]:
    """Return the extension modules, none unless PENSTOCK_COMPILE=1."""
    if os.environ.get("PENSTOCK_COMPILE") != "1":
        return []
    if {"develop", "editable_wheel", "--inplace"} & set(sys.argv):
        raise SystemExit("PENSTOCK_COMPILE=1 is for wheels: beside the sources, extension modules would hide them")
    from mypyc.build import mypycify

    # Debug information would be of the C code; tracebacks name Python's lines without it.
    return list(mypycify(modules(), opt_level="2", debug_level="0", separate=groups()))


if __name__ == "__main__":
    setup(ext_modules=extensions())
