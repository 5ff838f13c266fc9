"""Deltas and a result become the chunks that vLLM's server would send."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL, parse_body
from penstock.openai.chunks import Chunks
from penstock.openai.message import DivergedError
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb

WORDS = ["the", " ri", "ver", "", " é水", " runs", " on", "."]
"""Text of tokens 0, 1, …; one has none, as the first bytes of a character have none."""


def shape(url: str, **fields: Any) -> Shape:
    prompt: dict[str, Any] = {"prompt": "p"} if url == COMPLETIONS_URL else {"messages": [{"role": "user"}]}
    return Shape.of(parse_body(url, {**prompt, **fields}, streams=True))


def chunks(url: str = CHAT_URL, n: int = 1, usage: bool = False, **fields: Any) -> Chunks:
    return Chunks(shape(url, **fields), "r-1", 1_700_000_000, "tiny", n, usage)


def delta(start: int, end: int, attempt: int = 1, index: int = 0, **fields: Any) -> pb.TokenDelta:
    return pb.TokenDelta(
        request_id="r-1", attempt=attempt, index=index, offset=start, token_ids=range(start, end),
        text="".join(WORDS[start:end]), **fields,
    )  # fmt: skip


def choice(end: int, index: int = 0, **fields: Any) -> pb.Choice:
    fields.setdefault("finish_reason", pb.FINISH_REASON_STOP)
    return pb.Choice(index=index, text="".join(WORDS[:end]), token_ids=range(end), **fields)


def entries(start: int, end: int) -> list[pb.TokenLogprob]:
    return [pb.TokenLogprob(token_id=t, token=WORDS[t], logprob=-t - 0.5, rank=1) for t in range(start, end)]


def result(*choices: pb.Choice) -> pb.Result:
    usage = pb.Usage(prompt_tokens=9, completion_tokens=4)
    return pb.Result(request_id="r-1", outcome=pb.OUTCOME_COMPLETED, choices=choices, usage=usage)


HEAD = '{"id":"chatcmpl-r-1","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":['


def test_a_chat_reads_as_vllm_writes_it() -> None:
    """The lines are those of `vllm serve` for the same answer, but for ids and times."""
    stream = chunks(usage=True)
    assert stream.of_delta(delta(0, 2)) == [
        HEAD + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        ',"prompt_token_ids":null,"prompt_text":null}',
        HEAD + '{"index":0,"delta":{"content":"the ri"},"logprobs":null,"finish_reason":null,"token_ids":null}]}',
    ]
    assert stream.of_delta(delta(4, 5)) == [
        HEAD + '{"index":0,"delta":{"content":" é水"},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
    ]


def test_the_end_of_a_chat_reads_as_vllm_writes_it() -> None:
    assert chunks(usage=True).of_result(result(choice(3, finish_reason=pb.FINISH_REASON_LENGTH)))[1:] == [
        HEAD + '{"index":0,"delta":{"content":"the river"},"logprobs":null,"finish_reason":"length"'
        ',"stop_reason":null,"token_ids":null}]}',
        HEAD + '],"usage":{"prompt_tokens":9,"total_tokens":13,"completion_tokens":4}}',
    ]


def test_the_counts_of_a_stream_tell_what_was_cached() -> None:
    ended = result(choice(3))
    ended.usage.cached_tokens = 6
    last = chunks(usage=True).of_result(ended)[-1]
    assert last == (
        HEAD + '],"usage":{"prompt_tokens":9,"total_tokens":13,"completion_tokens":4'
        ',"prompt_tokens_details":{"cached_tokens":6}}}'
    )


def test_a_completion_reads_as_vllm_writes_it() -> None:
    head = '{"id":"cmpl-r-1","object":"text_completion","created":1700000000,"model":"tiny","choices":['
    stream = chunks(COMPLETIONS_URL)
    assert stream.of_delta(delta(0, 1)) == [
        head + '{"index":0,"text":"the","logprobs":null,"finish_reason":null,"stop_reason":null'
        ',"prompt_token_ids":null,"token_ids":null}]}'
    ]
    assert stream.of_result(result(choice(2, stop_string="x"))) == [
        head + '{"index":0,"text":" ri","logprobs":null,"finish_reason":"stop","stop_reason":"x"'
        ',"prompt_token_ids":null,"token_ids":null}]}'
    ]


def test_log_probabilities_go_on_where_the_text_stands() -> None:
    stream = chunks(COMPLETIONS_URL, logprobs=0)
    first = json.loads(stream.of_delta(delta(0, 2, logprobs=entries(0, 2)))[0])["choices"][0]["logprobs"]
    assert first["text_offset"] == [0, 3]
    last = json.loads(stream.of_result(result(choice(4, logprobs=entries(0, 4))))[0])["choices"][0]["logprobs"]
    assert (last["text_offset"], last["tokens"], last["token_logprobs"]) == ([6, 9], ["ver", ""], [-2.5, -3.5])
    chat = chunks(logprobs=True)
    shown = json.loads(chat.of_delta(delta(0, 1, logprobs=entries(0, 1)))[1])["choices"][0]["logprobs"]
    assert shown == {"content": [{"token": "the", "logprob": -0.5, "bytes": [116, 104, 101], "top_logprobs": []}]}


def test_each_of_n_completions_has_its_role_and_its_end() -> None:
    stream = chunks(n=2)
    lines = [json.loads(line) for line in stream.of_delta(delta(0, 1, index=1))]
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in lines] == [
        (0, {"role": "assistant", "content": ""}), (1, {"role": "assistant", "content": ""}), (1, {"content": "the"}),
    ]  # fmt: skip
    assert stream.of_delta(delta(0, 1, index=2)) == [], "an index nobody asked for"
    ends = [json.loads(line)["choices"][0] for line in stream.of_result(result(choice(1), choice(2, 1)))]
    assert [(end["index"], end["delta"]["content"], end["finish_reason"]) for end in ends] == [
        (0, "the", "stop"), (1, " ri", "stop"),
    ]  # fmt: skip


def test_completions_take_memory_when_something_is_said_of_them() -> None:
    """A body may ask for 16,384 of each of 1,024 prompts, and the writer of all is made at the first event."""
    tracemalloc.start()
    stream = chunks(COMPLETIONS_URL, n=100_000)
    assert len(stream.of_delta(delta(0, 1, index=99_999))) == 1
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


def told(lines: list[str]) -> str:
    """Return the text of chat chunks."""
    found = [json.loads(line)["choices"] for line in lines]
    return "".join(choices[0]["delta"]["content"] for choices in found if choices)


def test_a_later_attempt_that_says_the_same_goes_on() -> None:
    stream = chunks()
    said = told(stream.of_delta(delta(0, 3)))
    assert stream.of_delta(delta(0, 2, attempt=2)) == []
    said += told(stream.of_delta(delta(2, 5, attempt=2)))
    said += told(stream.of_result(result(choice(8))))
    assert said == "".join(WORDS)


@pytest.mark.parametrize("tokens", [[0, 7], [0, 1, 7]])
def test_a_later_attempt_that_says_something_else_ends_the_stream(tokens: list[int]) -> None:
    stream = chunks()
    stream.of_delta(delta(0, 3))
    with pytest.raises(DivergedError):
        stream.of_delta(pb.TokenDelta(attempt=2, token_ids=tokens, text="".join(WORDS[t] for t in tokens)))


def test_other_tokens_with_the_same_text_are_another_answer() -> None:
    stream = chunks(logprobs=True)
    stream.of_delta(delta(0, 2))
    with pytest.raises(DivergedError):
        stream.of_delta(pb.TokenDelta(attempt=2, token_ids=[0, 9], text="".join(WORDS[:2])))


@pytest.mark.parametrize("end", [1, 2])
def test_a_result_that_is_not_what_was_told_ends_the_stream(end: int) -> None:
    stream = chunks()
    stream.of_delta(delta(0, 3))
    with pytest.raises(DivergedError):
        stream.of_result(result(choice(end)))
    with pytest.raises(DivergedError):
        stream.of_result(result(pb.Choice(text="thy river", token_ids=[9, 1, 2])))


@given(
    attempts=st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=4),
    length=st.integers(0, len(WORDS)),
)
def test_a_stream_is_whole_whatever_deltas_came(attempts: list[list[int]], length: int) -> None:
    """Attempts that break off anywhere, deltas of any sizes, a tail that only the result has: every token once."""
    stream = chunks()
    lines: list[str] = []
    for attempt, sizes in enumerate(attempts, 1):
        start = 0
        for size in sizes:
            end = min(start + size, length)
            if end > start:
                lines += stream.of_delta(delta(start, end, attempt))
            start = end
    lines += stream.of_result(result(choice(length)))
    assert told(lines) == "".join(WORDS[:length])


def test_what_is_repeated_is_compared_once() -> None:
    """A long stream is told again from its start, and a list of all of it for each delta would hold up all others."""
    length, repeated = 25_000, 20_000
    stream = chunks(logprobs=True)
    stream.of_delta(pb.TokenDelta(attempt=1, token_ids=range(length), text="x" * length))
    assert stream.of_delta(pb.TokenDelta(attempt=2, token_ids=range(repeated), text="x" * repeated)) == []
    again = [pb.TokenDelta(attempt=2, token_ids=[repeated + n], text="x") for n in range(100)]
    tracemalloc.start()
    assert not any(stream.of_delta(one) for one in again)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20_000, "a list of the tokens takes 160,000"
    with pytest.raises(DivergedError):
        stream.of_delta(again[0])


@settings(max_examples=300)
@given(
    told_sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8),
    wrong_token=st.none() | st.integers(0, 5),
    wrong_character=st.none() | st.integers(0, 5),
)
def test_a_difference_is_found_at_the_delta_that_has_it(
    told_sizes: list[tuple[int, int]],
    sizes: list[tuple[int, int]],
    wrong_token: int | None,
    wrong_character: int | None,
) -> None:
    """What a later attempt has said is compared as if all of it came anew with each delta."""
    tokens, text = list(range(32)), "abcdefghijklmnopqrstuvwxyzABCDEF"
    stream = chunks(COMPLETIONS_URL, logprobs=0)
    at = chars = 0
    for count, length in told_sizes:
        stream.of_delta(said(1, tokens[at : at + count], text[chars : chars + length]))
        at, chars = at + count, chars + length
    others = [99 if n == wrong_token else token for n, token in enumerate(tokens)]
    other_text = "".join("?" if n == wrong_character else character for n, character in enumerate(text))
    new_at = new_chars = 0
    shown: list[Any] = []
    expected: list[Any] = []
    for count, length in sizes:
        one = said(2, others[new_at : new_at + count], other_text[new_chars : new_chars + length])
        seen, seen_chars = new_at, new_chars
        new_at, new_chars = new_at + count, new_chars + length
        expected.append(model(at, chars, seen, seen_chars, others[:new_at], other_text[:new_chars]))
        try:
            shown.append([text_and_tokens(line) for line in stream.of_delta(one)])
        except DivergedError:
            shown.append("differs")
            break
        if expected[-1] == "differs":
            break
    assert shown == expected


def said(attempt: int, tokens: list[int], text: str) -> pb.TokenDelta:
    logprobs = [pb.TokenLogprob(token_id=token, token=f"t{token}", logprob=-1.0) for token in tokens]
    return pb.TokenDelta(attempt=attempt, token_ids=tokens, text=text, logprobs=logprobs)


def text_and_tokens(line: str) -> tuple[str, list[str]]:
    shown = json.loads(line)["choices"][0]
    return shown["text"], (shown["logprobs"] or {"tokens": []})["tokens"]


def model(at: int, chars: int, seen: int, seen_chars: int, tokens: list[int], text: str) -> Any:
    """Return what is shown when an attempt that had said `seen` tokens has said these, of which `at` were told."""
    both, common = min(at, len(tokens)), min(chars, len(text))
    if tokens[:both] != list(range(both)) or "?" in text[:common]:
        return "differs"
    if len(tokens) < at or len(text) < chars:
        return []
    repeating = seen < at or seen_chars < chars
    first, first_chars = (at, chars) if repeating else (seen, seen_chars)
    return [(text[first_chars:], [f"t{token}" for token in tokens[first:]])]


def test_vllms_own_models_accept_every_chunk() -> None:
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    stream = chunks(usage=True)
    for line in [*stream.of_delta(delta(0, 2)), *stream.of_result(result(choice(4)))]:
        parsed = protocol.ChatCompletionStreamResponse.model_validate_json(line)
        assert not parsed.model_extra, "no field that vLLM does not have"
        assert parsed.model_dump_json(exclude_unset=True) == line, "the fields in vLLM's order"


def test_a_shape_travels_as_text() -> None:
    asked = shape(CHAT_URL, logprobs=True, top_logprobs=3, add_generation_prompt=False, return_tokens_as_token_ids=True)
    assert Shape.from_reference(asked.to_reference()) == asked
    echo = shape(COMPLETIONS_URL, echo=True)
    assert Shape.from_reference(echo.to_reference()) == echo
    for text in ("", "line 7", "openai/1 {", 'openai/1 {"other": 1}', "openai/1 []"):
        assert Shape.from_reference(text) == Shape()


@given(st.text(), st.sampled_from([CHAT_URL, COMPLETIONS_URL]), st.integers(0, 1))
def test_a_chunk_of_text_alone_is_as_any_other(text: str, url: str, index: int) -> None:
    """It is written around the text; with log probabilities of no position it goes the general way."""
    said = pb.TokenDelta(request_id="r-1", attempt=1, index=index, token_ids=[7], text=text)
    [line] = chunks(url, n=2).of_delta(said)[-1:]
    fields: dict[str, Any] = {"logprobs": True} if url == CHAT_URL else {"logprobs": 0}
    [general] = chunks(url, n=2, **fields).of_delta(said)[-1:]
    expected = json.loads(general)
    expected["choices"][0]["logprobs"] = None
    assert line == json.dumps(expected, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(("url", "logprobs"), [(CHAT_URL, True), (COMPLETIONS_URL, 0)])
def test_an_ending_is_the_same_however_often_it_is_written(url: str, logprobs: Any) -> None:
    stream = chunks(url, usage=True, logprobs=logprobs)
    stream.of_delta(delta(0, 1, logprobs=entries(0, 1)))
    whole = result(choice(4, logprobs=entries(0, 4)))
    assert stream.untold(whole) == 0.75
    ending = stream.ending("r-1")
    first = ["".join(line) for line in ending(whole)]
    assert ["".join(line) for line in ending(whole)] == first
    assert json.loads(first[0])["choices"][0]["logprobs"]
