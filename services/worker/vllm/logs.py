"""What vLLM and torch log, as the worker logs: for `--log-format json`, in the worker and in an engine core alike.

vLLM configures logging in each of its processes when it is imported, by the file that a variable of the environment
names; `logging.json` there has the root's handler alone, which is made here.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from services.logs import handler_of, log_warnings

CONFIGURATION = Path(__file__).with_name("logging.json")


def log_as_json() -> None:
    """Have vLLM log as JSON, unless the user has configured its logging; call it before vLLM is imported."""
    if os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0":
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(CONFIGURATION))


def json_handler() -> logging.Handler:
    """Return the handler of a process' root; vLLM calls it, in each of its processes, when it configures logging."""
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING").upper())
    log_warnings()
    # torch has a handler of its own, which writes as Google's programs do.
    torch = logging.getLogger("torch")
    torch.handlers.clear()
    torch.propagate = True
    return handler_of("json")
