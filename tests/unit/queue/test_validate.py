"""Submit validation: each bad field is refused by its name, and good requests pass."""

import math
from contextlib import suppress

import pytest

from penstock.request.v1 import request_pb2
from services.queue import wire
from services.queue.submits import validate
from services.queue.submits.validate import InvalidRequestError
from tests.support.json_depth import levels_around_the_limit

EARLIEST_NS = 10**17


def check(asked: request_pb2.Request, channels: set[str]) -> None:
    validate.check(asked, wire.meta_of(asked, asked.ByteSize()), channels)


def request(**fields: object) -> request_pb2.Request:
    values: dict[str, object] = {"channel": "batch", "text": "hi"}
    values.update(fields)
    return request_pb2.Request(**values)  # type: ignore[arg-type]


def sampling(**fields: object) -> request_pb2.Request:
    return request(sampling=request_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


def chat(messages: str, **fields: object) -> request_pb2.Request:
    prompt = request_pb2.ChatPrompt(messages_json=messages, **fields)  # type: ignore[arg-type]
    return request_pb2.Request(channel="batch", chat=prompt)


def offering(tools: str, choice: str = "") -> request_pb2.Request:
    use = request_pb2.ToolUse(tools_json=tools, tool_choice_json=choice)
    return chat('[{"role": "user", "content": "hi"}]', tools=use)


def structured(**fields: object) -> request_pb2.Request:
    return sampling(structured_outputs=request_pb2.StructuredOutputs(**fields))  # type: ignore[arg-type]


def in_pieces(piece: str, pieces: int) -> str:
    """Return JSON messages of so many strings, commas and opening brackets, all but a few of them in `piece`."""
    count, rest = divmod(pieces - 4, 2)
    return '[{"a":[' + f"{piece}," * count + "1," * rest + "1]}]"


MOST_PIECES = 131_072

GOOD = [
    chat(in_pieces("[]", MOST_PIECES)),
    chat('[{"content": "' + r"[{,\"\\" * MOST_PIECES + '"}]'),
    request(),
    request(text=""),
    request(deadline_unix_ns=EARLIEST_NS),
    request_pb2.Request(channel="batch", token_ids=request_pb2.TokenIds(ids=[1])),
    chat('[{"role": "user", "content": "hi"}]', chat_template_kwargs_json='{"a": 1}'),
    chat(r'[{"role": "user", "content": "\ud83d\ude00 \\ud83d"}]', chat_template_kwargs_json=r'{"a": "\ud83d\ude00"}'),
    offering('[{"type": "function"}]'),
    offering('[{"type": "function"}]', r'{"function": {"name": "\ud83d\ude00"}}'),
    offering('[{"type": "function"}]', '"none"'),
    sampling(n=1, max_tokens=1, temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=0.5, logprobs=-1),
    sampling(logit_bias={5: -100.0}, extra_args_json="{}", min_tokens=3, max_tokens=3),
    sampling(logit_bias=dict.fromkeys(range(1024), 1.0), allowed_token_ids=[1] * 1024, bad_words=["a"] * 1024),
    structured(json_schema="{}"),
    sampling(truncate_prompt_tokens=-1),
    sampling(truncate_prompt_tokens=1),
    structured(json_object=True),
    request(idempotency_key="é" * 256),
]

BAD = [
    (request(request_id="x"), "request_id"),
    (request(channel="nope"), "channel"),
    (request_pb2.Request(channel="batch"), "prompt"),
    (request_pb2.Request(channel="batch", token_ids=request_pb2.TokenIds()), "token_ids.ids"),
    (request(deadline_unix_ns=-1), "deadline_unix_ns"),
    (request(deadline_unix_ns=EARLIEST_NS - 1), "deadline_unix_ns"),
    (request(tenant="x" * 513), "tenant"),
    (request(idempotency_key="é" * 257), "idempotency_key"),
    (request(model="x" * 513), "model"),
    (request(batch="x" * 513), "batch"),
    (request(client_reference="x" * 4097), "client_reference"),
    (request(text="x" * (13 * 1024 * 1024)), "request"),
    (chat(""), "chat.messages_json"),
    (chat("[]"), "chat.messages_json"),
    (chat("{}"), "chat.messages_json"),
    (chat("[1]"), "chat.messages_json"),
    (chat("[" * 100_000), "chat.messages_json"),
    (chat(in_pieces("{}", MOST_PIECES + 1)), "chat.messages_json"),
    (chat(in_pieces('"{"', MOST_PIECES + 1)), "chat.messages_json"),
    (chat('["' + r"\"" * 1_000_000), "chat.messages_json"),
    (
        chat("[{}]", chat_template_kwargs_json='{"a":' + in_pieces("[]", MOST_PIECES) + "}"),
        "chat.chat_template_kwargs_json",
    ),
    (offering(in_pieces("[]", MOST_PIECES + 1)), "chat.tools.tools_json"),
    (structured(json_schema=in_pieces("[]", MOST_PIECES + 1)), "sampling.structured_outputs.json_schema"),
    (chat('[{"role": "user"}]', chat_template_kwargs_json="[]"), "chat.chat_template_kwargs_json"),
    (chat(r'[{"role": "user", "content": "\ud800"}]'), "chat.messages_json"),
    (chat('[{"role": "user"}]', chat_template_kwargs_json=r'{"\uDFFF": 1}'), "chat.chat_template_kwargs_json"),
    (chat('[{"role": "user"}]', chat_template_kwargs_json=f'{{"a": {2**64}}}'), "chat.chat_template_kwargs_json"),
    (
        chat('[{"role": "user"}]', chat_template_kwargs_json=f'{{"a": [{{"b": {-(2**63) - 1}}}]}}'),
        "chat.chat_template_kwargs_json",
    ),
    (offering(""), "chat.tools.tools_json"),
    (offering("["), "chat.tools.tools_json"),
    (offering("[" * 100_000), "chat.tools.tools_json"),
    (offering("[]"), "chat.tools.tools_json"),
    (offering("[1]"), "chat.tools.tools_json"),
    (offering("{}"), "chat.tools.tools_json"),
    (offering(r'[{"type": "\udead"}]'), "chat.tools.tools_json"),
    (offering("[{}]", "auto"), "chat.tools.tool_choice_json"),
    (offering("[{}]", "1"), "chat.tools.tool_choice_json"),
    (offering("[{}]", "[" * 100_000), "chat.tools.tool_choice_json"),
    (offering("[{}]", r'{"function": {"name": "\ud800"}}'), "chat.tools.tool_choice_json"),
    (sampling(n=0), "sampling.n"),
    (sampling(n=1 << 20), "sampling.n"),
    (sampling(max_tokens=0), "sampling.max_tokens"),
    (sampling(max_tokens=2, min_tokens=3), "sampling.min_tokens"),
    (sampling(temperature=-0.1), "sampling.temperature"),
    (sampling(temperature=math.nan), "sampling.temperature"),
    (sampling(temperature=math.inf), "sampling.temperature"),
    (sampling(top_p=0), "sampling.top_p"),
    (sampling(top_p=1.1), "sampling.top_p"),
    (sampling(top_k=-2), "sampling.top_k"),
    (sampling(min_p=1.5), "sampling.min_p"),
    (sampling(presence_penalty=2.5), "sampling.presence_penalty"),
    (sampling(frequency_penalty=-2.5), "sampling.frequency_penalty"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
    (sampling(logit_bias={7: 101.0}), "sampling.logit_bias[7]"),
    (sampling(logprobs=-2), "sampling.logprobs"),
    (sampling(prompt_logprobs=-2), "sampling.prompt_logprobs"),
    (sampling(truncate_prompt_tokens=-2), "sampling.truncate_prompt_tokens"),
    (sampling(truncate_prompt_tokens=0), "sampling.truncate_prompt_tokens"),
    (sampling(stop=["a", ""]), "sampling.stop"),
    (sampling(stop=["a"] * 5), "sampling.stop"),
    (sampling(stop=["é" * 2049]), "sampling.stop"),
    (sampling(stop_token_ids=[1] * 1025), "sampling.stop_token_ids"),
    (sampling(allowed_token_ids=[1] * 1025), "sampling.allowed_token_ids"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1000.0)), "sampling.logit_bias"),
    (sampling(bad_words=["x" * 64] * 1023 + ["x" * 63 + "é"]), "sampling.bad_words"),
    (sampling(bad_words=[""] * 1025), "sampling.bad_words"),
    (sampling(extra_args_json="1"), "sampling.extra_args_json"),
    (sampling(extra_args_json=r'{"a": "\ud800"}'), "sampling.extra_args_json"),
    (sampling(extra_args_json=f'{{"a": [1, {2**64}]}}'), "sampling.extra_args_json"),
    (structured(), "sampling.structured_outputs"),
    (structured(json_object=False), "sampling.structured_outputs.json_object"),
    (structured(json_schema="{"), "sampling.structured_outputs.json_schema"),
    (structured(json_schema=r'{"title": "\ud800"}'), "sampling.structured_outputs.json_schema"),
    (structured(choice=request_pb2.StructuredOutputs.Choices()), "sampling.structured_outputs.choice.values"),
]


@pytest.mark.parametrize(
    "good",
    [
        chat(
            '[{"role": "user"}]',
            chat_template_kwargs_json=f'{{"a": [{2**64 - 1}, {-(2**63)}, {2**70}.0, true, "{2**70}"], "{2**70}": 1}}',
        ),
        chat(f'[{{"role": "user", "content": "x", "n": {2**70}}}]'),
        structured(json_schema=f'{{"maximum": {2**70}}}'),
        sampling(extra_args_json=f'{{"a": {2**64 - 1}}}'),
    ],
)
def test_integers_are_bounded_where_the_engine_is_given_them_as_they_are(good: request_pb2.Request) -> None:
    check(good, {"batch"})


@pytest.mark.parametrize("good", GOOD)
def test_good_requests_pass(good: request_pb2.Request) -> None:
    check(good, {"batch"})


@pytest.mark.parametrize(("bad", "param"), BAD, ids=[param for _, param in BAD])
def test_bad_requests_are_refused_by_field(bad: request_pb2.Request, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        check(bad, {"batch"})
    assert refusal.value.failure.param == param
    assert refusal.value.failure.message.startswith(f"{param}: ")


def test_json_in_too_many_pieces_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("services.queue.submits.validate.json.loads")
    with pytest.raises(InvalidRequestError, match="has more than 131072 strings, commas and"):
        check(chat("[" + "{}," * 1_000_000 + "{}]"), {"batch"})


def test_an_unknown_channel_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match="known: batch, interactive"):
        check(request(channel="x"), {"interactive", "batch"})


def test_what_is_nested_almost_too_deeply_passes_or_is_refused() -> None:
    for levels in levels_around_the_limit():
        choice = '{"a": "\\ud83d\\ude00", "b": ' + "[" * levels + "]" * levels + "}"
        with suppress(InvalidRequestError):  # nothing else
            check(offering("[{}]", choice), {"batch"})


def test_what_is_nested_too_deeply_is_told_so() -> None:
    deep = sampling(extra_args_json='{"a": ' + "[" * 5000 + "]" * 5000 + "}")
    with pytest.raises(InvalidRequestError, match=r"^sampling\.extra_args_json: is nested too deeply$"):
        check(deep, {"batch"})


def test_a_refusal_is_short_however_long_what_it_quotes() -> None:
    with pytest.raises(InvalidRequestError, match="known: batch") as refusal:
        check(request(channel="\x01" * 1_000_000), {"batch"})
    assert len(refusal.value.failure.message) < 1000
    unknown = b"\xa0\x38\x01" * 20_000
    with pytest.raises(InvalidRequestError, match="does not know: 900") as refusal:
        check(request_pb2.Request.FromString(request().SerializeToString() + unknown), {"batch"})
    assert len(refusal.value.failure.message) < 1000
    many = request_pb2.Request.FromString(request().SerializeToString() + unknown * 10)
    with pytest.raises(InvalidRequestError, match="does not know: inside a submessage, or too many to name"):
        check(many, {"batch"})


def test_a_number_is_quoted_as_it_was_given() -> None:
    with pytest.raises(InvalidRequestError, match=r"1000001 is out of range: must be at least 1 and at most \d{5}$"):
        check(request(sampling=request_pb2.SamplingParams(n=1_000_001)), {"batch"})


def test_unknown_fields_are_refused_with_their_numbers_at_every_depth() -> None:
    varint_field_900 = b"\xa0\x38\x01"
    outer = request_pb2.Request.FromString(request().SerializeToString() + varint_field_900)
    with pytest.raises(InvalidRequestError, match="does not know: 900"):
        check(outer, {"batch"})
    inner = request()
    inner.sampling.MergeFromString(varint_field_900)
    with pytest.raises(InvalidRequestError, match=r"sampling\.900"):
        check(inner, {"batch"})


def test_a_known_field_of_the_wrong_wire_type_is_refused() -> None:
    text_as_varint = b"\x58\x01"  # field 11 (text) as a number
    wrong = request_pb2.Request.FromString(request().SerializeToString() + text_as_varint)
    with pytest.raises(InvalidRequestError, match="does not know: 11"):
        check(wrong, {"batch"})


def test_unknown_fields_inside_a_constraint_or_another_kind_of_prompt_are_refused() -> None:
    varint_field_900 = b"\xa0\x38\x01"
    constrained = sampling(structured_outputs=request_pb2.StructuredOutputs(regex="a"))
    constrained.sampling.structured_outputs.MergeFromString(varint_field_900)
    tokens = request(text="", token_ids=request_pb2.TokenIds(ids=[1]))
    tokens.token_ids.MergeFromString(varint_field_900)
    for wrong in (constrained, tokens):
        with pytest.raises(InvalidRequestError, match=r"\.900"):
            check(wrong, {"batch"})


def test_no_other_part_of_a_text_request_can_hide_unknown_fields() -> None:
    """The quick look for unknown fields knows these; a new one must be added to it."""
    held = {
        kind.DESCRIPTOR.name: {field.name for field in kind.DESCRIPTOR.fields if field.message_type is not None}
        for kind in (request_pb2.Request, request_pb2.SamplingParams)
    }
    assert held == {
        "Request": {"token_ids", "chat", "sampling"},
        "SamplingParams": {"logit_bias", "structured_outputs"},
    }
