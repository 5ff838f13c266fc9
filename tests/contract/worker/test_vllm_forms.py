"""What gives an output its form is looked at in the tokenizer's process, with the words that the engine has for it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.request.v1 import request_pb2 as pb
from penstock.tiny_model import make_tiny_model
from services.worker.engine import EngineRequest, PromptSpec, Rendered, RequestRefusedError
from services.worker.wire import prompt_spec
from tests.contract.worker.conftest import VLLM_ARGUMENTS, UnderTest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]
real_vllm = pytest.mark.parametrize("made", ["vllm"], indirect=True, scope="package")

FIELD = "sampling.structured_outputs"
TEXT = "The gate feeds the wheel"
CHOICE = pb.StructuredOutputs.Choices(values=["yes", "no"])


def limited(**lengths: int) -> str:
    return json.dumps({"type": "string", **lengths})


def texts(count: int, **more: int) -> str:
    """Return a schema of an object of texts that are not equally long."""
    fields = {f"k{at}": {"type": "string", "minLength": at, "maxLength": 255, **more} for at in range(count)}
    return json.dumps({"type": "object", "properties": fields})


def tag(structure: Any = None, triggers: Any = ("<a>",)) -> str:
    structures = [structure or {"begin": "<a>", "schema": {}, "end": "</a>"}]
    return json.dumps({"structures": structures, "triggers": triggers})


REFUSED: dict[str, dict[str, Any]] = {
    "no JSON": {"json_schema": "{nope"},
    "nothing at all": {},
    "no such type": {"json_schema": '{"type": "text"}'},
    "what no backend can do": {"json_schema": '{"type": "array", "uniqueItems": true}'},
    "an empty schema": {"json_schema": ""},
    "no regex": {"regex": "("},
    "NUL": {"regex": "a\x00"},
    "no grammar": {"grammar": "root ::= ("},
    "an empty grammar": {"grammar": " "},
    "no choices": {"choice": pb.StructuredOutputs.Choices()},
    "no structural tag": {"structural_tag": "{}"},
    "a tag with an empty trigger": {"structural_tag": tag(triggers=[""])},
    "a tag that begins with a number": {"structural_tag": tag({"begin": 5, "schema": {}, "end": ""})},
    "a tag whose triggers are a text": {"structural_tag": tag(triggers="ab")},
    "false": {"json_object": False},
    "beyond the bounds": {"choice": pb.StructuredOutputs.Choices(values=[str(number) for number in range(10_001)])},
    "lengths beyond the bounds": {"json_schema": texts(20)},
}


async def engine_says(made: UnderTest, request: pb.Request) -> tuple[str, str, str] | None:
    """Return the engine's refusal of a request, if it has one."""
    ids = made.renderer.render(prompt_spec(request)).token_ids
    most = request.sampling.max_tokens or made.engine.shape.max_model_len - len(ids)
    try:
        async for _ in made.engine.generate(
            EngineRequest(f"f{id(request)}", ids, most, request.sampling, request.echo)
        ):
            pass
    except RequestRefusedError as error:
        return error.code, error.message, error.param
    return None


def look_says(made: UnderTest, request: pb.Request) -> tuple[str, str, str] | None:
    """Return what is said of it in the tokenizer's process."""
    spec = prompt_spec(request)
    assert spec.form
    try:
        made.renderer.check_form(spec, made.renderer.render(spec))
    except RequestRefusedError as error:
        return error.code, error.message, error.param
    return None


@real_vllm
@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize("which", REFUSED)
async def test_a_refusal_is_the_engines_own(made: UnderTest, which: str) -> None:
    sampling = pb.SamplingParams(max_tokens=9, structured_outputs=pb.StructuredOutputs(**REFUSED[which]))
    request = pb.Request(text=TEXT, sampling=sampling)
    said = look_says(made, request)
    assert said is not None
    assert said[2] == FIELD
    assert said == await engine_says(made, request)


@real_vllm
@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize("fields", [{"temperature": -1.0}, {"logprobs": 10_000}, {"allowed_token_ids": [2**30]}])
async def test_what_else_is_wrong_is_said_first_as_there(made: UnderTest, fields: dict[str, Any]) -> None:
    wanted = pb.StructuredOutputs(json_schema='{"type": "text"}')
    request = pb.Request(text=TEXT, sampling=pb.SamplingParams(max_tokens=9, structured_outputs=wanted, **fields))
    said = look_says(made, request)
    assert said is not None
    assert next(iter(fields)) in said[2]
    assert said == await engine_says(made, request)


@real_vllm
@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": limited(maxLength=3)}, {"json_schema": '{"patternProperties": {"^a": {}}}'},
        {"choice": CHOICE}, {"regex": "[ab]{4}"}, {"grammar": 'root ::= "x"'}, {"json_object": True},
    ],
)  # fmt: skip
async def test_what_it_takes_passes(made: UnderTest, form: dict[str, Any]) -> None:
    sampling = pb.SamplingParams(max_tokens=3, structured_outputs=pb.StructuredOutputs(**form))
    assert look_says(made, pb.Request(text=TEXT, sampling=sampling)) is None


@real_vllm
@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize("most", [0, 9, 400])
async def test_lengths_are_held_against_the_output_that_there_is_room_for(made: UnderTest, most: int) -> None:
    """What it cannot come to does not count: the engine, which is told the number, says the same."""
    lengths = [{"type": "string", "maxLength": 3000 + number} for number in range(20)]
    wanted = pb.StructuredOutputs(json_schema=json.dumps({"type": "array", "prefixItems": lengths}))
    sampling = pb.SamplingParams(structured_outputs=wanted)
    if most:
        sampling.max_tokens = most
    request = pb.Request(text=TEXT, sampling=sampling)
    said = look_says(made, request)
    assert (said is None) is (most == 9)
    assert said == await engine_says(made, request)


@real_vllm
def test_a_prompt_that_leaves_no_room_is_refused_for_that_alone(made: UnderTest) -> None:
    wanted = pb.StructuredOutputs(json_schema='{"type": "text"}')
    request = pb.Request(token_ids=pb.TokenIds(ids=[40] * 512), sampling=pb.SamplingParams(structured_outputs=wanted))
    assert look_says(made, request) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def with_tools(schema: Any, choice: Any, **sampling: Any) -> pb.Request:
    tools = json.dumps([{"type": "function", "function": {"name": "clock", "strict": True, "parameters": schema}}])
    chat = pb.ChatPrompt(
        messages_json='[{"role": "user", "content": "when?"}]',
        tools=pb.ToolUse(tools_json=tools, tool_choice_json=json.dumps(choice)),
    )
    return pb.Request(chat=chat, sampling=pb.SamplingParams(max_tokens=9, **sampling))


NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("parser", "choice"),
    [("hermes", "required"), ("hermes", NAMED), ("hermes", "auto"), ("pythonic", "required"), ("pythonic", NAMED)],
)
def test_what_a_parser_makes_of_functions_to_be_called_is_looked_at_too(
    model: Path, parser: str, choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.worker.vllm.engine import prepare

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    renderer = prepare(str(model), ("tiny",), VLLM_ARGUMENTS, parser).make_renderer()
    fine = prompt_spec(with_tools({"type": "object", "properties": {"utc": {"type": "boolean"}}}, choice))
    renderer.check_form(fine, renderer.render(fine))
    fields = {f"n{number}": {"type": "integer"} for number in range(600)}
    wrong = prompt_spec(with_tools({"type": "object", "properties": fields}, choice))
    with pytest.raises(RequestRefusedError, match="a part of the schema has 600 properties") as caught:
        renderer.check_form(wrong, renderer.render(wrong))
    assert (caught.value.code, caught.value.param) == ("invalid_parameter", FIELD)


def test_parsers_that_the_engine_will_not_start_with_are_left_to_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer has none of the marks that this one reads by: the worker says so, and ends."""
    from services.worker.vllm.engine import prepare
    from services.worker.vllm.parsing import parser_class

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    renderer = prepare(str(model), ("tiny",), VLLM_ARGUMENTS, "deepseek_v3").make_renderer()
    with pytest.raises(TypeError, match="cannot be used with the tokenizer"):
        parser_class("deepseek_v3", "", renderer._renderer.tokenizer)
    spec = prompt_spec(pb.Request(text=TEXT))
    assert renderer.render(spec).token_ids


@pytest.mark.long
def test_who_ends_of_a_form_or_is_held_up_by_one_is_not_the_worker(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.vllm_form_death", str(tmp_path / "tiny")]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = ast.literal_eval(done.stdout.splitlines()[-1])
    why = "the structured outputs cannot be looked at: "
    assert answers == {
        "plain": "rendered",
        "deep": ("invalid_parameter", f"{why}the process that did ended (signal 11)", FIELD, True),
        "shaped": "rendered",
        "slow tool": ("invalid_parameter", f"{why}it took over 2 s of processor time", FIELD, True),
        "calling": "rendered",
    }


@pytest.mark.parametrize("spec", ["", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'])
def test_where_a_cpu_drafts_only_greedy_runs_are_served(
    model: Path, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.worker.vllm.engine import prepare

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = [*VLLM_ARGUMENTS, *(["--speculative-config", spec] if spec else [])]
    renderer = prepare(str(model), ("tiny",), arguments).make_renderer()
    form = pb.StructuredOutputs(choice=CHOICE)

    def look(**fields: Any) -> None:
        asked = pb.Request(text=TEXT, sampling=pb.SamplingParams(max_tokens=3, structured_outputs=form, **fields))
        renderer.check_form(prompt_spec(asked), renderer.render(prompt_spec(asked)))

    look(temperature=0.0)
    look(temperature=0.0, top_k=5, top_p=0.5)
    for sampled in ({}, {"temperature": 0.7}, {"top_k": 5}):
        if not spec:
            look(**sampled)
            continue
        with pytest.raises(RequestRefusedError, match="cannot sample with --speculative-config") as caught:
            look(**sampled)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "sampling.temperature")


def test_what_vllm_has_on_a_cpu_for_temperatures_of_drafted_tokens_writes_nowhere() -> None:
    """Once it does, sampled runs can be served (`drafts.py`)."""
    import torch
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    expanded = torch.full((2,), -1.0)
    _expand_kernel_impl(expanded, torch.tensor([0.7]), torch.tensor([2]), 0, 1)
    assert expanded.tolist() == [-1.0, -1.0]


def test_a_worker_starts_though_its_forms_cannot_be_looked_at() -> None:
    """As with a backend that is configured and not installed: who sends one is told, and prompts are rendered."""
    from services.worker.vllm.forms import CheckingVllmRenderer

    renderer, understanding = Mock(), Mock()
    renderer.render.return_value = Rendered(array("I", [1]))
    understanding.limits = (None, None)
    understanding.of.side_effect = ModuleNotFoundError("no such backend")
    checking = CheckingVllmRenderer(renderer, understanding, 512, tells_reasoning=False)
    checking.warm_up()
    understanding.of.assert_called_once()
    assert checking.render(PromptSpec(text="a gate")).token_ids
