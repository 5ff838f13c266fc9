"""What a `seed` needs on a CPU: random numbers that are taken back where the token they were drawn for is thrown away.

vLLM draws a token for each request of a step, also where only a part of its prompt was computed: of a prompt that goes
beyond the step's budget of tokens, which all requests share, or of one that is computed again after a preemption. That
token is thrown away, and for what comes to be as if the prompt had been computed at once, vLLM sets the generator of a
request with a seed back by what was drawn. It does so by an offset, which generators have on a GPU and not on a CPU:
torch raises there, in the engine core, which ends with all that it runs.
"""

from __future__ import annotations

from typing import Any, Final

from vllm import SamplingParams
from vllm.sampling_params import SamplingType

from services.worker.engine import RequestRefusedError

PLAIN_WORKER: Final = "vllm.v1.worker.cpu_worker.CPUWorker"
REWINDING_WORKER: Final = "services.worker.vllm.cpu_worker.RewindingWorker"
"""vLLM imports it by its name, in the process of each rank."""


def have_rewound(config: Any) -> None:
    """Have the engine of vLLM's `config` rewind generators on a CPU, unless a worker of somebody else's is asked for.

    Elsewhere the plain worker has another name.
    """
    if config.parallel_config.worker_cls == PLAIN_WORKER:
        config.parallel_config.worker_cls = REWINDING_WORKER


def refuse_seed(config: Any, params: SamplingParams) -> None:
    """Raise RequestRefusedError for a seed that could end the engine of vLLM's `config`: nothing rewinds there.

    The second model runner has no generators: it makes its random numbers of the seed and the position.
    """
    if config.device_config.device_type != "cpu" or params.sampling_type is not SamplingType.RANDOM_SEED:
        return
    if config.parallel_config.worker_cls != REWINDING_WORKER and not config.use_v2_model_runner:
        text = "seed: vLLM on a CPU cannot rewind its random numbers with --worker-cls"
        raise RequestRefusedError("unsupported_parameter", text, "sampling.seed")


def rewind(runner: Any) -> None:
    """Have a model `runner` on a CPU give a generator its earlier state where what it draws is thrown away.

    vLLM, which would set them back by the offset, is shown none at that moment.
    """
    sample, keep_books = runner._sample, runner._bookkeeping_sync

    def sample_and_rewind(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators.items()
        thrown_away = runner.discard_request_mask.np
        earlier = [(generator, generator.get_state()) for index, generator in generators if thrown_away[index]]
        sampled = sample(*args, **kwargs)
        for generator, state in earlier:
            generator.set_state(state)
        return sampled

    def keep_books_without_generators(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return keep_books(*args, **kwargs)
        finally:
            batch.generators = generators

    runner._sample, runner._bookkeeping_sync = sample_and_rewind, keep_books_without_generators
