"""What the worker relies on, of every engine."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.request.v1 import request_pb2 as pb
from services.worker.core.sizing import Sizes, need_blocks
from services.worker.engine import EngineRequest, EngineStep, PromptSpec, RequestRefusedError
from services.worker.outputs import RunOutput
from services.worker.simulated.engine import ByteRenderer, SimulatedEngine
from services.worker.untrusted import TOKENIZING
from tests.contract.worker.conftest import BLOCKS, UnderTest
from tests.support.results import result_of

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120)]

names = (f"run-{i}" for i in itertools.count())


def generation(
    made: UnderTest, text: str = "The gate feeds the wheel", max_tokens: int = 8, run_id: str = "", **sampling: object
) -> AsyncIterator[EngineStep]:
    ids = made.renderer.render(PromptSpec(text=text)).token_ids
    fields = {"ignore_eos": True, "temperature": 0.0, **sampling}
    params = pb.SamplingParams(**fields)  # type: ignore[arg-type]
    return made.engine.generate(EngineRequest(run_id or next(names), ids, max_tokens, params))


async def collect(steps: AsyncIterator[EngineStep]) -> tuple[RunOutput, list[EngineStep]]:
    output, seen = RunOutput(), []
    async for step in steps:
        output.take(step)
        seen.append(step)
    return output, seen


def on_cuda(made: UnderTest) -> bool:
    if isinstance(made.engine, SimulatedEngine):
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


async def until_all_free(made: UnderTest) -> None:
    """A further short run makes a step, whose report shows what is held."""
    await collect(generation(made, max_tokens=1))
    assert made.reports[-1].blocks_free == BLOCKS


async def test_the_shape_says_what_can_be_booked(made: UnderTest) -> None:
    shape = made.engine.shape
    assert (shape.blocks_total, shape.block_size, shape.max_model_len) == (BLOCKS, 32, 512)
    assert shape.model == "tiny"
    # Where the next step is scheduled while one runs, as on CUDA, a sequence holds the place of one more token.
    assert shape.lookahead_tokens == int(on_cuda(made))
    assert shape.most_blocks in (0, shape.max_model_len // shape.block_size)
    assert shape.byte_bounded_tokenizer


async def test_no_text_has_more_tokens_than_the_bound_says(made: UnderTest) -> None:
    shape = made.engine.shape
    for text in ("plain words", "Grüße 🙂 \u0958 \t\n", "\ufb01 \x00\x7f", "a" * 300):
        ids = made.renderer.render(PromptSpec(text=text)).token_ids
        assert len(ids) <= len(text.encode()) + shape.special_tokens


async def test_a_run_ends_finished_with_as_many_tokens_as_asked_for(made: UnderTest) -> None:
    output, steps = await collect(generation(made, max_tokens=12))
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(output.choices[0].token_ids) == 12
    assert output.finish_reasons == ["length"]
    assert "".join(output.choices[0].texts)


async def test_equal_prompts_give_equal_text(made: UnderTest) -> None:
    runs = await asyncio.gather(*(collect(generation(made, max_tokens=20)) for _ in range(4)))
    texts = {"".join(output.choices[0].texts) for output, _ in runs}
    assert len(texts) == 1


async def test_n_completions_come_under_their_indices(made: UnderTest) -> None:
    output, steps = await collect(generation(made, max_tokens=6, n=3, temperature=1.0, seed=7))
    assert sorted(output.choices) == [0, 1, 2]
    assert output.tokens == 18
    assert [step.finished for step in steps].count(True) == 1
    assert output.finish_reasons == ["length"] * 3


async def test_a_report_precedes_the_outputs_of_its_step_and_the_last_shows_the_blocks_free(made: UnderTest) -> None:
    await until_all_free(made)
    before = len(made.reports)
    async for step in generation(made, max_tokens=4):
        assert len(made.reports) > before
        before = len(made.reports)
        if step.finished:
            assert made.reports[-1].blocks_free == BLOCKS
            assert made.reports[-1].running == 0
        else:
            assert made.reports[-1].blocks_free < BLOCKS


async def test_a_run_never_holds_more_than_its_need(made: UnderTest) -> None:
    await until_all_free(made)
    ids = made.renderer.render(PromptSpec(text="x")).token_ids
    lookahead = made.engine.shape.lookahead_tokens
    sizes = Sizes(BLOCKS, BLOCKS, 32, 512, lookahead)
    for extra in range(3):
        max_tokens = 32 + 1 - len(ids) + extra  # the peak is just below, at, and just above one block
        start = len(made.reports)
        await collect(generation(made, "x", max_tokens=max_tokens))
        most = max(BLOCKS - report.blocks_free for report in made.reports[start:])
        # A report shows what is held after the step; the last token's step ends with nothing held.
        assert lookahead or most == need_blocks(sizes, len(ids), max_tokens - 1, 1)
        assert most <= need_blocks(sizes, len(ids), max_tokens, 1)


async def test_abort_frees_the_blocks_and_ends_the_iterator(made: UnderTest) -> None:
    run_id = next(names)
    started = asyncio.Event()

    async def consume() -> list[EngineStep]:
        seen = []
        async for step in generation(made, max_tokens=480, run_id=run_id):
            seen.append(step)
            started.set()
        return seen

    task = asyncio.get_running_loop().create_task(consume())
    await started.wait()
    await made.engine.abort(run_id)
    seen = await asyncio.wait_for(task, 60)
    assert seen[-1].finished
    assert seen[-1].choices[0].finish_reason == "abort"
    assert len(seen) < 480
    await until_all_free(made)


async def test_cancelling_the_consumer_frees_the_blocks(made: UnderTest) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in generation(made, max_tokens=480):
            started.set()

    task = asyncio.get_running_loop().create_task(consume())
    await started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until_all_free(made)


async def paced(made: UnderTest, tell_at: int, max_tokens: int, **sampling: object) -> AsyncIterator[EngineStep]:
    ids = made.renderer.render(PromptSpec(text="The gate")).token_ids
    params = pb.SamplingParams(ignore_eos=True, temperature=0.0, **sampling)  # type: ignore[arg-type]
    async for step in made.engine.generate(EngineRequest(next(names), ids, max_tokens, params, tell_at_tokens=tell_at)):
        yield step


@contextmanager
def hand_overs(made: UnderTest) -> Iterator[list[int]]:
    """Yield the lengths at which vLLM hands over the output of the one run.

    They are read where it does so: what comes while a reader is late, on a busy machine, is joined for it.
    """
    lengths: list[int] = []
    if isinstance(made.engine, SimulatedEngine):
        yield lengths
        return
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.output_processor import RequestOutputCollector

    put = RequestOutputCollector.put

    def noted(collector: Any, output: Any) -> None:
        if isinstance(output, RequestOutput):
            lengths.append((lengths[-1] if lengths else 0) + len(output.outputs[0].token_ids))
        put(collector, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestOutputCollector, "put", noted)
        yield lengths


@pytest.mark.parametrize("tell_at", [0, 1, 2, 3, 20, 60, 500])
async def test_a_run_handed_over_in_portions_has_every_token_once(made: UnderTest, tell_at: int) -> None:
    whole, _ = await collect(generation(made, "The gate", max_tokens=60, logprobs=1))
    with hand_overs(made) as lengths_told:
        output, steps = await collect(paced(made, tell_at, 60, logprobs=1))
    assert output.choices[0].token_ids == whole.choices[0].token_ids
    assert "".join(output.choices[0].texts) == "".join(whole.choices[0].texts)
    scored = [[entry.token_id for entry in result_of(run).choices[0].logprobs] for run in (output, whole)]
    assert scored[0] == scored[1]
    assert len(scored[0]) in (0, 60), "only vLLM scores"
    first = lengths_told[0] if lengths_told else len(steps[0].choices[0].token_ids)
    if tell_at not in (1, 2, 3):  # outputs that come fast are handed over together
        assert first == 1, "the first token is not held back"


async def test_what_is_guaranteed_goes_before_what_is_not_and_is_not_preempted_for_it(made: UnderTest) -> None:
    assert made.engine.shape.guaranteed_first
    ids = made.renderer.render(PromptSpec(text="The gate")).token_ids
    params = pb.SamplingParams(ignore_eos=True, temperature=0.0)
    began: list[str] = []
    preempted: dict[str, int] = {}

    async def consume(name: str, max_tokens: int, guaranteed: bool = False) -> None:
        request = EngineRequest(next(names), ids, max_tokens, params, guaranteed=guaranteed)
        async for step in made.engine.generate(request):
            if name not in began:
                began.append(name)
            preempted[name] = step.preemptions

    # As many as run at once, and they grow to three times the cache; the last two wait until somebody is preempted.
    before = [consume(f"before-{number}", 400) for number in range(16)]
    await asyncio.gather(*before, consume("plain", 300), consume("guaranteed", 300, guaranteed=True))
    assert began.index("guaranteed") < began.index("plain")
    assert preempted.pop("guaranteed") == 0
    assert sum(preempted.values()) > 0
    await until_all_free(made)


@pytest.mark.parametrize("lengths", [[20, 40], [2, 3, 4], [30, 0], [0, 1], [10, 1, 30], [10, 1, 0], [25, 3, 40]])
async def test_an_output_comes_when_the_run_is_as_long_as_wanted(made: UnderTest, lengths: list[int]) -> None:
    whole, _ = await collect(generation(made, "The gate", max_tokens=60))
    first, *others = lengths
    run_id = next(names)
    ids = made.renderer.render(PromptSpec(text="The gate")).token_ids
    params = pb.SamplingParams(ignore_eos=True, temperature=0.0)
    seen, wanted, began = RunOutput(), first, len(made.tokens)
    due = [first]
    with hand_overs(made) as lengths_told:
        async for step in made.engine.generate(EngineRequest(run_id, ids, 60, params, tell_at_tokens=first)):
            seen.take(step)
            if isinstance(made.engine, SimulatedEngine):
                lengths_told.append(seen.longest)
            if others and wanted <= seen.longest:
                wanted = others.pop(0)
                if wanted > sum(step.generated for step in made.tokens[began:]):
                    due.append(wanted)  # else it is late already, and comes at once
                made.engine.tell_at(run_id, wanted)
    assert not others
    # Never later than wanted: an output ends at that length, not beyond it.
    assert {length for length in due if length} <= set(lengths_told)
    assert seen.choices[0].token_ids == whole.choices[0].token_ids
    assert "".join(seen.choices[0].texts) == "".join(whole.choices[0].texts)


async def test_what_was_held_back_comes_at_once_when_it_is_wanted(made: UnderTest) -> None:
    run_id, began = next(names), len(made.tokens)
    ids = made.renderer.render(PromptSpec(text="The gate")).token_ids
    params = pb.SamplingParams(ignore_eos=True, temperature=0.0)
    seen = RunOutput()

    async def consume() -> None:
        async for step in made.engine.generate(EngineRequest(run_id, ids, 480, params, tell_at_tokens=0)):
            seen.take(step)

    task = asyncio.get_running_loop().create_task(consume())
    while sum(step.generated for step in made.tokens[began:]) < 50:
        await asyncio.sleep(0.001)
    generated = sum(step.generated for step in made.tokens[began:])
    made.engine.tell_at(run_id, 1)
    await asyncio.sleep(0)
    assert seen.tokens >= generated - 1  # the last step's tokens are told of before its outputs are seen
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until_all_free(made)


async def test_every_token_is_counted_and_every_gap_but_the_first_tokens(made: UnderTest) -> None:
    began = len(made.tokens)
    await asyncio.gather(*(collect(paced(made, 0, 30)) for _ in range(3)))
    assert sum(step.generated for step in made.tokens[began:]) == 90
    gaps_s = [gap_s for step in made.tokens[began:] for gap_s in step.gaps_s]
    assert len(gaps_s) == 87
    assert all(gap_s > 0 for gap_s in gaps_s)


async def test_changing_the_pace_of_an_unknown_run_changes_nothing(made: UnderTest) -> None:
    made.engine.tell_at("nobody", 5)
    output, _ = await collect(generation(made, max_tokens=3))
    assert output.tokens == 3


async def test_aborting_an_unknown_run_changes_nothing(made: UnderTest) -> None:
    await made.engine.abort("nobody")
    output, _ = await collect(generation(made, max_tokens=3))
    assert output.tokens == 3


async def test_prefills_are_counted_with_the_time_they_took(made: UnderTest) -> None:
    await until_all_free(made)
    before = made.reports[-1]
    words = [f"{next(names)} turns the wheel" for _ in range(3)]
    for text in words:
        await collect(generation(made, text, max_tokens=3))
    await until_all_free(made)
    after = made.reports[-1]
    prompts = [
        len(made.renderer.render(PromptSpec(text=text)).token_ids) for text in (*words, "The gate feeds the wheel")
    ]
    # What an earlier prompt has left in the prefix cache is not computed.
    assert sum(prompts[:-1]) // 2 < after.prefill_tokens - before.prefill_tokens <= sum(prompts)
    assert after.prefill_ns > before.prefill_ns or not after.step_ns, "only an engine of no time takes none"


@pytest.mark.parametrize("n", [1, 4])
async def test_more_than_fits_is_queued_and_all_end(made: UnderTest, n: int) -> None:
    before = made.reports[-1].preemptions if made.reports else 0
    asked = [generation(made, f"{i} " * 20, max_tokens=160, n=n, temperature=1.0) for i in range(24 // n)]
    runs = await asyncio.gather(*map(collect, asked))
    assert all(output.tokens == 160 * n for output, _ in runs)
    assert made.reports[-1].preemptions > before
    assert made.reports[-1].preemptions - before == sum(output.preemptions for output, _ in runs)
    await until_all_free(made)


@pytest.mark.parametrize("wrong", ["not json", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"], ids=["no JSON", "deep"])
async def test_a_bad_parameter_is_refused_before_anything_runs(made: UnderTest, wrong: str) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        await collect(generation(made, extra_args_json=wrong))
    assert "extra_args_json" in caught.value.param
    assert caught.value.message


async def test_prompts_that_cannot_be_rendered_are_refused(made: UnderTest) -> None:
    for spec, code in (
        (PromptSpec(text="x " * 600), "context_length_exceeded"),
        (PromptSpec(messages_json='[{"content": "no role"}]'), ""),
    ):
        with pytest.raises(RequestRefusedError) as caught:
            made.renderer.render(spec)
        assert caught.value.message
        assert code in caught.value.code


CHAT = json.dumps([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "spec",
    [
        PromptSpec(messages_json=CHAT, chat_template="{% for i in range(99999) %}{% endfor %}"),
        PromptSpec(messages_json=CHAT, chat_template_kwargs_json='{"chat_template": "x"}'),
    ],
)
async def test_a_template_of_the_clients_is_not_run(made: UnderTest, spec: PromptSpec) -> None:
    if isinstance(made.renderer, ByteRenderer) and not spec.chat_template:
        pytest.skip("the simulated engine has no template that could be told anything")
    with pytest.raises(RequestRefusedError, match="untrusted chat template") as caught:
        made.renderer.render(spec)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "chat_template")


@pytest.mark.vllm
async def test_every_parameter_of_transformers_that_is_no_variable_of_a_template_is_known() -> None:
    from transformers import PreTrainedTokenizerBase

    parameters = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    ours = {
        "self",
        "conversation",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "kwargs",
    }
    assert parameters - ours - {"documents"} == set(TOKENIZING)


@pytest.mark.vllm
@pytest.mark.parametrize("name", TOKENIZING)
async def test_how_a_chat_is_tokenized_is_not_the_clients_to_say(made: UnderTest, name: str) -> None:
    if isinstance(made.renderer, ByteRenderer):
        pytest.skip("the simulated engine has no template that could be told anything")
    with pytest.raises(RequestRefusedError, match=f"chat_template_kwargs.{name} is no variable") as caught:
        made.renderer.render(PromptSpec(messages_json=CHAT, chat_template_kwargs_json=json.dumps({name: True})))
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "chat_template_kwargs")


async def test_no_address_in_a_message_is_opened(made: UnderTest) -> None:
    with socket.create_server(("127.0.0.1", 0)) as internal:
        url = f"http://127.0.0.1:{internal.getsockname()[1]}/"
        for part in ({"type": "image_url", "image_url": {"url": url}}, {"video_url": url}):
            messages = json.dumps([{"role": "user", "content": [part]}])
            with pytest.raises(RequestRefusedError, match="not supported") as caught:
                made.renderer.render(PromptSpec(messages_json=messages))
            assert caught.value.param == "messages.0.content.0.type"
        internal.setblocking(False)
        with pytest.raises(BlockingIOError):
            internal.accept()


async def test_token_ids_out_of_the_vocabulary_are_refused(made: UnderTest) -> None:
    async def run() -> None:
        ids = made.renderer.render(PromptSpec(token_ids=(1, 2**31))).token_ids
        await collect(made.engine.generate(EngineRequest(next(names), ids, 3, pb.SamplingParams())))

    with pytest.raises(RequestRefusedError, match="out of vocabulary") as caught:
        await run()
    assert (caught.value.code, caught.value.param) == ("invalid_prompt", "prompt")


async def test_a_prompt_is_rendered_alike_every_time_and_truncated_on_demand(made: UnderTest) -> None:
    full = made.renderer.render(PromptSpec(text="one two three four five"))
    assert made.renderer.render(PromptSpec(text="one two three four five")) == full
    cut = made.renderer.render(PromptSpec(text="one two three four five", truncate_prompt_tokens=3))
    assert len(cut.token_ids) == 3
    ids = tuple(full.token_ids) * 200  # beyond the window
    for most, left in ((3, 3), (400, 400), (-1, made.engine.shape.max_model_len - 1)):
        for wanted in (0, 1):  # 0 means as many as there is room for, and one at least
            spec = PromptSpec(token_ids=ids, truncate_prompt_tokens=most, max_tokens=wanted)
            assert made.renderer.render(spec).token_ids.tolist() == list(ids[-left:])
    same = made.renderer.render(PromptSpec(token_ids=tuple(full.token_ids), want_text=True))
    assert same.token_ids == full.token_ids
    assert same.text is not None
    assert "three" in same.text


async def test_a_chat_is_rendered_with_its_roles(made: UnderTest) -> None:
    messages = '[{"role": "user", "content": "hello"}]'
    whole = made.renderer.render(PromptSpec(messages_json=messages))
    bare = made.renderer.render(PromptSpec(messages_json=messages, add_generation_prompt=False))
    assert len(whole.token_ids) > len(bare.token_ids)
    assert whole.token_ids[: len(bare.token_ids)] == bare.token_ids
