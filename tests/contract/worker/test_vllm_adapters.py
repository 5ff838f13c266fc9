"""LoRA adapters: each is another model beside the one it changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio

from penstock.request.v1 import request_pb2 as pb
from penstock.tiny_model import Shape, make_tiny_model
from services.worker.engine import Engine, EngineRequest, RequestRefusedError
from services.worker.vllm.checks import NotServedError
from services.worker.wire import reported_model
from tests.support.adapter import make_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

ARGUMENTS = [
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--block-size", "32",
    "--num-gpu-blocks-override", "65", "--enable-lora", "--max-loras", "3",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[Engine]:
    from services.worker.vllm.engine import prepare

    modules = [f"{name}={make_adapter(model.parent / name, seed)}" for seed, name in enumerate(("poet", "clerk"))]
    prepared = prepare(str(model), ("tiny", "alias"), [*ARGUMENTS, "--lora-modules", *modules])
    with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
        engine = prepared.build(metrics_read=False, forks=False)
    deaths: list[str] = []
    engine.start(lambda _: None, deaths.append, lambda _: None)
    yield engine
    assert not deaths
    await asyncio.wait_for(engine.close(), 20)


async def said(engine: Engine, name: str) -> tuple[int, ...]:
    """Return what the model says under a name; a run is called by it."""
    params = pb.SamplingParams(ignore_eos=True, temperature=0.0)
    request = EngineRequest(f"run-{name}", range(2, 40), 24, params, model=name)
    tokens: list[int] = []
    async for step in engine.generate(request):
        tokens += step.choices[0].token_ids
    return tuple(tokens)


async def test_an_adapter_answers_under_its_own_name_alone(engine: Engine) -> None:
    assert engine.shape.model_aliases == ("alias", "poet", "clerk")
    assert [reported_model(engine.shape, name) for name in ("", "alias", "poet")] == ["tiny", "tiny", "poet"]
    # All at once: in one batch, and with the same prompt in the prefix cache.
    names = ("tiny", "poet", "clerk", "alias", "")
    answers = dict(zip(names, await asyncio.gather(*(said(engine, name) for name in names)), strict=True))
    assert answers["tiny"] == answers["alias"] == answers[""]
    assert len(set(answers.values())) == 3
    assert await said(engine, "poet") == answers["poet"]


@pytest.mark.parametrize(
    ("fields", "echo", "param"),
    [
        ({"prompt_logprobs": 1}, False, "sampling.prompt_logprobs"),
        ({"prompt_logprobs": 0, "logprobs": 1}, True, "sampling.prompt_logprobs"),
        ({"logprobs": 1}, True, "echo"),
    ],
)
@pytest.mark.parametrize("name", ["tiny", "poet"])
async def test_what_would_end_the_engine_beside_others_is_refused(
    engine: Engine, name: str, fields: dict[str, int], echo: bool, param: str
) -> None:
    request = EngineRequest("run-probed", range(2, 40), 4, pb.SamplingParams(**fields), echo, model=name)  # type: ignore[arg-type]
    with pytest.raises(RequestRefusedError, match="on a CPU cannot give the log probabilities") as refused:
        await anext(aiter(engine.generate(request)))
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)
    plain = EngineRequest("run-echoed", range(2, 40), 4, pb.SamplingParams(logprobs=1), model=name)
    assert [step async for step in engine.generate(plain)][-1].finished


@pytest.mark.parametrize(
    ("modules", "flags", "said_of_it"),
    [
        (["poet={0}/small"], [], "--lora-modules: adapters need --enable-lora"),
        (["poet={0}/big"], ["--enable-lora"], "--lora-modules poet: LoRA rank 64 is greater than max_lora_rank 16"),
        (["poet={0}/none"], ["--enable-lora"], "--lora-modules poet: [Errno 2] No such file or directory"),
        (["tiny={0}/small"], ["--enable-lora"], "--lora-modules tiny: every adapter needs a name of its own"),
        (["a={0}/small", "a={0}/small"], ["--enable-lora"], "--lora-modules a: every adapter needs a name"),
    ],
)
async def test_an_adapter_that_cannot_be_served_is_named(
    model: Path, capsys: pytest.CaptureFixture[str], modules: list[str], flags: list[str], said_of_it: str
) -> None:
    from services.worker.vllm.engine import prepare

    make_adapter(model.parent / "small")
    make_adapter(model.parent / "big", rank=64)
    named = [module.format(model.parent) for module in modules]
    with pytest.raises(SystemExit) as ending:
        prepare(str(model), ("tiny",), ["--dtype", "float32", "--max-loras", "3", *flags, "--lora-modules", *named])
    assert ending.value.code == 78
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock worker: ")]
    assert [line.partition(said_of_it)[:2] for line in lines] == [
        ("penstock worker: the engine's arguments do not fit: ", said_of_it)
    ]


@pytest.mark.parametrize(("device", "places", "serves"), [("cpu", 2, False), ("cpu", 3, True), ("cuda", 1, True)])
async def test_on_a_cpu_a_place_is_left_empty_for_who_asks_for_no_adapter(
    model: Path, device: str, places: int, serves: bool
) -> None:
    from vllm.config import LoRAConfig
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath

    from services.worker.vllm.adapters import adapters_of

    config = SimpleNamespace(
        lora_config=LoRAConfig(max_loras=places),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(max_model_len=512),
    )
    modules = [LoRAModulePath(name, str(make_adapter(model.parent / "small"))) for name in "ab"]
    if serves:
        assert [*adapters_of(config, modules, ("tiny",))] == ["a", "b"]
    else:
        with pytest.raises(NotServedError, match="--lora-modules: 2 adapters need --max-loras 3 on a CPU"):
            adapters_of(config, modules, ("tiny",))


async def test_an_adapter_whose_weights_do_not_fit_is_named_before_a_request_meets_it(engine: Any, model: Path) -> None:
    from vllm.lora.request import LoRARequest

    from services.worker.vllm.adapters import load

    other = make_adapter(model.parent / "other", shape=Shape(hidden_size=256))
    with pytest.raises(RuntimeError, match="--lora-modules other cannot be loaded"):
        await load(engine._llm, {"other": LoRARequest("other", 9, str(other))})
    assert await said(engine, "poet"), "the engine is none the worse for it"


async def test_the_watch_over_the_engine_tells_of_what_cannot_be_loaded() -> None:
    from services.worker.vllm.engine import VllmEngine

    async def refuse(_: Any) -> bool:
        raise ValueError("shapes differ")

    watching: Any = VllmEngine.__new__(VllmEngine)
    watching._llm, watching._adapters = SimpleNamespace(add_lora=refuse), {"poet": None}
    deaths: list[str] = []
    await watching._watch_health(deaths.append)
    assert deaths == ["--lora-modules poet cannot be loaded: shapes differ"]
