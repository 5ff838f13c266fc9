"""Whether an engine on a CPU keeps what a seed promises, or its requests are refused for theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.engine import RequestRefusedError

pytestmark = pytest.mark.vllm


def config(worker: str, device: str = "cpu", second_runner: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker),
        device_config=SimpleNamespace(device_type=device),
        use_v2_model_runner=second_runner,
    )


@pytest.mark.parametrize(
    ("worker", "device", "second_runner", "refused"),
    [
        ("vllm.v1.worker.cpu_worker.CPUWorker", "cpu", False, False),
        ("somebody.else.Worker", "cpu", False, True),
        ("somebody.else.Worker", "cpu", True, False),
        ("vllm.v1.worker.gpu_worker.Worker", "cuda", False, False),
    ],
)
def test_a_seed_is_refused_where_nothing_rewinds(worker: str, device: str, second_runner: bool, refused: bool) -> None:
    from vllm import SamplingParams

    from services.worker.vllm.seeds import have_rewound, refuse_seed

    engine = config(worker, device, second_runner)
    have_rewound(engine)
    for harmless in (SamplingParams(temperature=0.0, seed=7), SamplingParams(temperature=1.0)):
        refuse_seed(engine, harmless)
    seeded = SamplingParams(temperature=1.0, seed=7)
    if not refused:
        refuse_seed(engine, seeded)
        return
    with pytest.raises(RequestRefusedError) as caught:
        refuse_seed(engine, seeded)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "sampling.seed")


def test_vllms_workers_are_told_apart_by_their_names() -> None:
    """And the one that rewinds is vLLM's for a CPU, by the name that vLLM imports it by."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from services.worker.vllm.seeds import PLAIN_WORKER, REWINDING_WORKER

    rewinding = resolve_obj_by_qualname(REWINDING_WORKER)
    assert issubclass(rewinding, resolve_obj_by_qualname(PLAIN_WORKER))


def test_generators_on_a_cpu_have_no_offset() -> None:
    """Once they have, vLLM rewinds them itself."""
    import torch

    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator().get_offset()
