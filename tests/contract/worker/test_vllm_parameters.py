"""Sampling parameters as real vLLM takes them, and what it gives back for them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from unittest.mock import patch

import pytest
from prometheus_client import REGISTRY

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import EngineRequest, PromptSpec, RequestRefusedError
from services.worker.outputs import RunOutput
from tests.contract.worker.conftest import BLOCKS, MOST_PREFILLED, UnderTest
from tests.support.json_depth import levels_around_the_limit
from tests.support.results import result_of

pytestmark = [
    pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120),
    pytest.mark.parametrize("made", ["vllm"], indirect=True, scope="package"),
]  # fmt: skip


X = 93
"""The tiny model's token for it."""


async def run(made: UnderTest, sampling: pb.SamplingParams, max_tokens: int = 12, echo: bool = False) -> RunOutput:
    ids = made.renderer.render(PromptSpec(text="The gate feeds the wheel")).token_ids
    output = RunOutput()
    async for step in made.engine.generate(EngineRequest(f"p{id(sampling)}", ids, max_tokens, sampling, echo)):
        output.take(step)
    return output


def text(output: RunOutput) -> str:
    return "".join(output.choices[0].texts)


def greedy(**fields: object) -> pb.SamplingParams:
    return pb.SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **fields})  # type: ignore[arg-type]


async def test_a_stop_string_ends_the_text_and_is_named(made: UnderTest) -> None:
    whole = text(await run(made, greedy()))
    stop = whole[4:7]
    output = await run(made, greedy(stop=[stop]))
    assert text(output) == whole[: whole.index(stop)]
    assert output.choices[0].stop_reason == stop
    assert output.stopped_by_string()
    kept = await run(made, greedy(stop=[stop], include_stop_str_in_output=True))
    assert text(kept) == whole[: whole.index(stop) + len(stop)]


async def test_a_stop_token_ends_the_text_and_is_named(made: UnderTest) -> None:
    tokens = (await run(made, greedy())).choices[0].token_ids
    output = await run(made, greedy(stop_token_ids=[tokens[5]]))
    assert output.finish_reasons == ["stop"]
    assert output.choices[0].stop_reason == tokens[5]
    result = pb.Result()
    output.fill(result, None)
    assert result.choices[0].stop_token_id == tokens[5]
    assert result.choices[0].finish_reason == pb.FINISH_REASON_STOP


async def test_logprobs_come_for_each_token_likeliest_first(made: UnderTest) -> None:
    output = await run(made, greedy(logprobs=3))
    choice = result_of(output).choices[0]
    assert len(choice.logprobs) == len(choice.token_ids) == 12
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entry.token_id == token_id
        assert [top.rank for top in entry.top] == [1, 2, 3]
        assert entry.rank == 1
        assert entry.top[0].token_id == token_id
        assert entry.logprob == entry.top[0].logprob <= 0


async def test_echo_with_logprobs_gives_the_prompts_logprobs(made: UnderTest) -> None:
    output = await run(made, greedy(logprobs=2), echo=True)
    ids = made.renderer.render(PromptSpec(text="The gate feeds the wheel")).token_ids
    scored = result_of(output).prompt_logprobs
    assert [entry.token_id for entry in scored] == list(ids)
    assert scored[0].rank == 0
    assert all(len(entry.top) == 2 for entry in scored[1:])


async def test_a_seed_repeats_what_was_sampled(made: UnderTest) -> None:
    first = text(await run(made, greedy(temperature=1.0, seed=11)))
    assert text(await run(made, greedy(temperature=1.0, seed=11))) == first
    assert text(await run(made, greedy(temperature=1.0, seed=12))) != first


async def test_a_seed_means_the_same_in_however_many_steps_its_prompt_is_computed(made: UnderTest) -> None:
    """What is drawn in a step that ends within the prompt is thrown away; on a CPU vLLM's core would end of it."""
    ids = [20 + 7 * number % 1900 for number in range(MOST_PREFILLED + 50)]
    beside = made.engine.generate(EngineRequest("beside", [40, 41], 400, greedy()))
    await anext(aiter(beside))
    first = max(len(made.reports) - 1, 0)
    outputs = []
    for name in ("in two steps", "in one"):
        output = RunOutput()
        async for step in made.engine.generate(EngineRequest(name, ids, 12, greedy(temperature=1.0, seed=11))):
            output.take(step)
        outputs.append(output)
    await made.engine.abort("beside")
    held = [BLOCKS - report.blocks_free for report in made.reports[first:]]
    grew = [after - before for before, after in pairwise(held)]
    part = MOST_PREFILLED // 32
    assert {part, part + 1} & {*grew}, "the prompt was computed at once"  # one more if the run beside it grew as well
    assert [output.cached_tokens for output in outputs] == [0, len(ids) // 32 * 32]
    assert outputs[0].choices[0].token_ids == outputs[1].choices[0].token_ids


async def test_only_allowed_tokens_are_generated(made: UnderTest) -> None:
    output = await run(made, greedy(allowed_token_ids=[40, 41]))
    assert set(output.choices[0].token_ids) <= {40, 41}
    biased = await run(made, greedy(logit_bias={77: 100.0}))
    assert set(biased.choices[0].token_ids) == {77}


async def test_structured_output_keeps_to_its_shape(made: UnderTest) -> None:
    choice = pb.StructuredOutputs(choice=pb.StructuredOutputs.Choices(values=["yes", "no"]))
    assert text(await run(made, pb.SamplingParams(temperature=0.0, structured_outputs=choice))) in {"yes", "no"}
    regex = pb.StructuredOutputs(regex="[ab]{4}")
    assert set(text(await run(made, pb.SamplingParams(temperature=0.0, structured_outputs=regex)))) <= {"a", "b"}
    schema = pb.StructuredOutputs(
        json_schema='{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}',
        disable_any_whitespace=True,
        disable_additional_properties=True,
    )
    found = text(await run(made, pb.SamplingParams(temperature=0.0, structured_outputs=schema), max_tokens=40))
    assert set(json.loads(found)) == {"a"}


async def test_a_schema_of_a_thousand_million_items_is_as_long_as_its_run(made: UnderTest) -> None:
    schema = json.dumps({"type": "array", "minItems": 10**9, "items": {"type": "integer"}})
    output = await run(made, greedy(structured_outputs=pb.StructuredOutputs(json_schema=schema)))
    assert text(output).startswith("[")
    assert output.finish_reasons == ["length"]


async def test_cached_prompt_tokens_are_counted(made: UnderTest) -> None:
    ids = list(range(20, 120))
    output = RunOutput()
    for name in ("cache-1", "cache-2"):
        output = RunOutput()
        async for step in made.engine.generate(EngineRequest(name, ids, 2, greedy())):
            output.take(step)
    assert output.cached_tokens == 96


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"logprobs": 10_000}, "logprobs"),
        ({"allowed_token_ids": [2**30]}, "allowed_token_ids"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"structured_outputs": pb.StructuredOutputs(json_schema="{nope")}, ""),
        ({"structured_outputs": pb.StructuredOutputs()}, "structured outputs"),
        ({"extra_args_json": "[1]"}, "extra_args_json"),
        ({"extra_args_json": '{"a": ' + "[" * 5000 + "]" * 5000 + "}"}, "extra_args_json is nested too deeply"),
    ],
)
async def test_what_vllm_refuses_is_refused_with_its_words(
    made: UnderTest, fields: dict[str, object], said: str
) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        await run(made, pb.SamplingParams(**fields))  # type: ignore[arg-type]
    assert said in caught.value.message
    assert caught.value.param.startswith("sampling")
    assert (await run(made, greedy())).tokens == 12


async def test_extra_arguments_that_are_nested_almost_too_deeply_run_or_are_refused(made: UnderTest) -> None:
    """The queue may read what the worker cannot, and the worker what it cannot tell to vLLM's core."""
    refused = []
    for levels in levels_around_the_limit()[::4]:
        try:
            await run(made, greedy(extra_args_json='{"a": ' + "[" * levels + "]" * levels + "}"), 1)
        except RequestRefusedError as error:
            refused.append(error)
    assert 0 < len(refused) < len(levels_around_the_limit()[::4])
    assert all(error.param.startswith("sampling") and "nested too deeply" in error.message for error in refused)
    assert (await run(made, greedy())).tokens == 12


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
async def test_where_the_engine_takes_its_cache_from_is_not_the_clients_to_say(made: UnderTest, name: str) -> None:
    asked = {name: {"do_remote_prefill": True, "remote_prefill_cached_tokens": 10**12}}
    with pytest.raises(RequestRefusedError) as caught:
        await run(made, greedy(extra_args_json=json.dumps(asked)))
    assert caught.value.code == "unsupported_parameter"
    assert (caught.value.param, name in caught.value.message) == ("sampling.extra_args_json", True)
    assert (await run(made, greedy(extra_args_json='{"others": {"kv_transfer_params": 1}}'))).tokens == 12


async def test_a_run_that_the_engine_never_starts_is_no_prefill(made: UnderTest) -> None:
    # Of vLLM's two compilers the engine core has the one that its first grammar came to.
    regex = pb.StructuredOutputs(regex="[ab]{4}")
    await run(made, pb.SamplingParams(temperature=0.0, structured_outputs=regex))
    before = made.reports[-1]
    # Only the other one knows such a class: the front-end's checks, which try both, let it pass.
    with pytest.raises(RequestRefusedError, match="cannot compile"):
        await run(made, greedy(structured_outputs=pb.StructuredOutputs(regex=r"\p{L}+")))
    await run(made, greedy())
    after = made.reports[-1]
    assert after.prefill_ns - before.prefill_ns < 60e9
    prompt = made.renderer.render(PromptSpec(text="The gate feeds the wheel")).token_ids
    assert after.prefill_tokens - before.prefill_tokens == len(prompt)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_grammar_that_allows_no_first_token_is_refused(made: UnderTest, n: int) -> None:
    grammar = pb.StructuredOutputs(grammar='root ::= root "x"')
    with pytest.raises(RequestRefusedError, match="allow no first token") as caught:
        await run(made, pb.SamplingParams(temperature=1.0, structured_outputs=grammar, n=n))
    assert (caught.value.code, caught.value.param) == ("invalid_parameter", "sampling.structured_outputs")
    assert (await run(made, greedy())).tokens == 12


@pytest.mark.parametrize("n", [1, 2])
async def test_a_grammar_that_the_engines_backend_cannot_compile_is_refused(made: UnderTest, n: int) -> None:
    """vLLM takes what any backend can compile, and compiles it with the one that was asked for first."""
    await run(made, pb.SamplingParams(structured_outputs=pb.StructuredOutputs(grammar='root ::= "x"')))
    grammar = pb.StructuredOutputs(grammar='start: %regex {"substring_words": "a b"}')
    with pytest.raises(RequestRefusedError, match="cannot compile") as caught:
        await run(made, pb.SamplingParams(structured_outputs=grammar, n=n))
    assert (caught.value.code, caught.value.param) == ("invalid_parameter", "sampling.structured_outputs")
    assert (await run(made, greedy())).tokens == 12


@pytest.mark.parametrize(
    ("form", "narrowing", "named"),
    [
        ({"regex": "[z]{9}"}, {"allowed_token_ids": [X]}, "allowed_token_ids"),
        ({"regex": "x{3}z{9}"}, {"allowed_token_ids": [X]}, "allowed_token_ids"),
        ({"regex": "x{3}z"}, {"bad_words": ["z"]}, "bad_words"),
        ({"regex": "x{3}z"}, {"allowed_token_ids": [X], "bad_words": ["z"]}, "allowed_token_ids and bad_words"),
    ],
)
@pytest.mark.parametrize("every", [0, 1])
async def test_what_forbids_all_that_the_shape_allows_is_named_wherever_that_is(
    made: UnderTest, form: dict[str, str], narrowing: dict[str, object], named: str, every: int
) -> None:
    sampling = pb.SamplingParams(temperature=0.0, structured_outputs=pb.StructuredOutputs(**form), **narrowing)  # type: ignore[arg-type]
    request = EngineRequest(f"n{id(sampling)}", [40, 41, 42], 30, sampling, tell_at_tokens=every)
    with pytest.raises(RequestRefusedError, match=f"outputs and {named} together leave no token") as caught:
        async for _ in made.engine.generate(request):
            pass
    assert (caught.value.code, caught.value.param) == ("invalid_parameter", "sampling.structured_outputs")


async def test_what_forbids_a_part_of_what_the_shape_allows_is_kept_to(made: UnderTest) -> None:
    form = pb.StructuredOutputs(regex="[xy]{9}")
    output = await run(made, pb.SamplingParams(structured_outputs=form, bad_words=["y"], min_tokens=9), max_tokens=30)
    assert text(output) == "x" * 9
    three = pb.SamplingParams(structured_outputs=pb.StructuredOutputs(regex="x{3}"), min_tokens=9)
    assert text(await run(made, three, max_tokens=30)) == "xxx"


@pytest.mark.parametrize(
    ("fields", "echo", "param"),
    [
        ({"prompt_logprobs": -1, "logprobs": 1}, False, "sampling.prompt_logprobs"),
        ({"logprobs": -1}, True, "echo"),
    ],
)
async def test_what_can_never_be_stored_is_not_computed(
    made: UnderTest, fields: dict[str, int], echo: bool, param: str
) -> None:
    await run(made, greedy())
    before = made.reports[-1]
    request = EngineRequest("large", [40, 41] * 255, 2, greedy(**fields), echo)
    with pytest.raises(RequestRefusedError, match="510 prompt tokens take at least 15628845 bytes") as caught:
        await anext(aiter(made.engine.generate(request)))
    assert (caught.value.code, caught.value.param) == ("result_too_large", param)
    await run(made, greedy())
    prompt = made.renderer.render(PromptSpec(text="The gate feeds the wheel")).token_ids
    assert made.reports[-1].prefill_tokens - before.prefill_tokens <= len(prompt)


async def test_what_fails_in_vllm_and_says_nothing_tells_what_it_came_of(made: UnderTest) -> None:
    from vllm.v1.engine.exceptions import EngineGenerateError

    async def failing(*_: object, **__: object) -> AsyncIterator[object]:
        raise EngineGenerateError from KeyError("a block")
        yield

    with patch.object(made.engine._llm, "generate", failing), pytest.raises(KeyError, match="a block"):  # type: ignore[attr-defined]
        await run(made, greedy())


async def test_metrics_that_nobody_reads_are_not_kept(made: UnderTest) -> None:
    await run(made, greedy())
    assert made.reports
    assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("vllm")]


def records(made: UnderTest) -> int:
    """Return how many runs vLLM's front-end knows."""
    return int(made.engine._llm.output_processor.get_num_unfinished_requests())  # type: ignore[attr-defined]


async def test_what_cannot_be_told_to_the_engine_core_is_refused_with_words_and_leaves_nothing(made: UnderTest) -> None:
    with pytest.raises(RequestRefusedError) as half:
        await run(made, greedy(extra_args_json=r'{"a": "\ud800"}'))
    assert half.value.code == "invalid_parameter"
    assert "surrogates not allowed" in half.value.message
    assert not records(made)
    said = OverflowError("can't serialize ints < -2**63 or > 2**64 - 1")
    core = made.engine._llm.engine_core  # type: ignore[attr-defined]
    with patch.object(core, "add_request_async", side_effect=said), pytest.raises(RequestRefusedError) as much:
        await run(made, greedy())
    assert much.value.message == str(said)
    assert not records(made)


async def test_a_start_that_fails_leaves_nothing_in_vllms_front_end(made: UnderTest) -> None:
    core = made.engine._llm.engine_core  # type: ignore[attr-defined]
    with patch.object(core, "add_request_async", side_effect=OSError("lost")), pytest.raises(OSError, match="lost"):
        await run(made, greedy())
    assert not records(made)
    assert text(await run(made, greedy()))
