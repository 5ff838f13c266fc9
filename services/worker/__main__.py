"""Runs the worker: `python -m services.worker --model NAME_OR_PATH [engine arguments]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TextIO

from services.life import live
from services.logs import start_logging
from services.rpc.server import require_port
from services.worker.engine import CheckingRenderer
from services.worker.processes import children_die_with_us
from services.worker.rendering import Rendering
from services.worker.service import Parts, serve
from services.worker.settings import Arguments, WorkerSettings, load_arguments
from services.worker.tokenizer import TokenizerPool


def main() -> None:
    """Read the arguments, make the engine, serve; exit 0, 69 (port), 70 (engine) or 78 (settings)."""
    arguments = load_arguments(sys.argv[1:])
    settings = arguments.settings
    start_logging(settings.log_level, settings.log_format)
    for address in filter(None, (settings.listen, settings.metrics_listen)):
        require_port(address)  # they are taken only once there is an engine, which may take minutes
    announce = reserve_stdout()
    if settings.engine_threads:
        os.environ["OMP_NUM_THREADS"] = str(settings.engine_threads)
    children_die_with_us()
    make = _simulated if settings.engine == "simulated" else _vllm
    parts = make(arguments)
    status = live("worker", settings, partial(serve, settings, parts, announce), settings.the_worker_id())
    for stream in (announce, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # Libraries of the engine leave threads behind that would hold an ordinary exit up.
    os._exit(status)


def reserve_stdout() -> TextIO:
    """Return standard output for the ready line alone; what libraries print goes to standard error.

    What is forked from now on does not have it: who reads it sees its end when this process ends.
    """
    announce = os.fdopen(os.dup(1), "w")
    os.register_at_fork(after_in_child=announce.close)
    os.dup2(2, 1)
    return announce


def _simulated(arguments: Arguments) -> Parts:
    from services.worker.simulated.engine import ByteRenderer, SimulatedEngine
    from services.worker.simulated.settings import simulated_settings

    settings = arguments.settings
    name, *aliases = settings.names()
    size = simulated_settings(name, tuple(aliases), arguments.engine_arguments, arguments.with_place)
    pool = _forked(settings, lambda: ByteRenderer(size.max_model_len))
    own = ByteRenderer(size.max_model_len)
    return Parts(lambda: SimulatedEngine(size), Rendering(pool, own))


def _vllm(arguments: Arguments) -> Parts:
    from services.worker.vllm.engine import prepare
    from services.worker.vllm.logs import log_as_json

    settings = arguments.settings
    engine_arguments = arguments.engine_arguments
    if settings.log_format == "json":
        log_as_json()
        engine_arguments = ["--no-use-tqdm-on-load", *engine_arguments]  # a bar of progress is no record
    prepared = prepare(
        settings.model,
        settings.names(),
        engine_arguments,
        settings.tool_call_parser,
        settings.trust_request_chat_template,
        arguments.with_place,
    )
    # The tokenizers and their nursery come first: they must inherit neither the engine's connections nor its threads.
    pool = _forked(settings, prepared.make_renderer)
    engine = prepared.build(metrics_read=bool(settings.metrics_listen))
    return Parts(lambda: engine, Rendering(pool, prepared.make_renderer_of(engine)))


def _forked(settings: WorkerSettings, make_renderer: Callable[[], CheckingRenderer]) -> TokenizerPool:
    return TokenizerPool.fork(make_renderer, settings.tokenizer_processes, settings.engine_stall_s)


if __name__ == "__main__":
    main()
