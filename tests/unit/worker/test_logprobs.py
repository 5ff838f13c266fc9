"""Log probabilities are encoded as they come, and counted: by what they take in the result."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import ChoiceStep, EngineStep, TokenProbability
from services.worker.logprobs import encoded, fields
from services.worker.outputs import RunOutput

NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, -1.0, -float("inf")]), st.floats(-1e300, 0))
IDS = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))


def entries(tops: st.SearchStrategy[Sequence[TokenProbability]]) -> st.SearchStrategy[TokenProbability]:
    tokens = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
    return st.builds(TokenProbability, IDS, tokens, NUMBERS, IDS, tops.map(tuple))


ENTRIES = entries(st.lists(entries(st.just(())), max_size=30))


def message(entry: TokenProbability) -> pb.TokenLogprob:
    tops = [message(top) for top in entry.top]
    return pb.TokenLogprob(token_id=entry.token_id, token=entry.token, logprob=entry.logprob, rank=entry.rank, top=tops)


def tagged(*entry: TokenProbability) -> bytes:
    return pb.Choice(logprobs=map(message, entry)).SerializeToString()


@given(st.lists(ENTRIES, max_size=4))
def test_they_are_encoded_as_protobuf_does(some: list[TokenProbability]) -> None:
    tag = tagged(TokenProbability(0, "", 0.0, 0))[:1]
    assert fields(tag, [encoded(entry) for entry in some]) == tagged(*some)


def test_half_a_surrogate_pair_in_one_fails_nothing() -> None:
    whole = encoded(TokenProbability(7, "a\ud800b", -1.0, 1))
    assert pb.TokenLogprob.FromString(whole[1:]).token == "a?b"


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.text("ab\u00e9\u6c34", max_size=3), st.lists(ENTRIES, max_size=3), st.booleans()),
    max_size=9,
)


@given(STEPS, st.lists(ENTRIES, max_size=3))
def test_deltas_and_the_result_have_every_one_in_its_place(
    steps: list[tuple[int, str, list[TokenProbability], bool]], of_prompt: list[TokenProbability]
) -> None:
    output, expected, heard = RunOutput(), RunOutput(), dict[int, list[pb.TokenLogprob]]()
    wanted: dict[int, list[pb.TokenLogprob]] = {}
    for piece in (of_prompt[:1], of_prompt[1:]):
        output.take(EngineStep([], False, prompt_logprobs=piece))
    for index, text, scored, heard_of in steps:
        ids = [entry.token_id for entry in scored]
        output.take(EngineStep([ChoiceStep(index, ids, text, scored)], False))
        expected.take(EngineStep([ChoiceStep(index, ids, text)], False))
        wanted.setdefault(index, []).extend(map(message, scored))
        if heard_of:
            listen(output, heard)
    listen(output, heard)
    result, same = pb.Result(), pb.Result()
    more = b"".join(output.fill(result, "prompt"))
    assert expected.fill(same, "prompt") == []
    for choice in same.choices:
        choice.logprobs.extend(wanted[choice.index])
    same.prompt_logprobs.extend(map(message, of_prompt))
    size_bytes = len(result.SerializeToString() + more)
    result.MergeFromString(more)
    assert result.SerializeToString() == same.SerializeToString()
    assert {index: said for index, said in heard.items() if said} == {i: said for i, said in wanted.items() if said}
    assert output.least_bytes <= size_bytes
    assert expected.least_bytes + len(tagged(*of_prompt)) <= output.least_bytes


def listen(output: RunOutput, heard: dict[int, list[pb.TokenLogprob]]) -> None:
    """Join the deltas of a watcher, as the queue reads them."""
    for delta, logprobs in output.deltas("r1", 1):
        whole = pb.TokenDelta.FromString(delta.SerializeToString() + logprobs)
        heard.setdefault(whole.index, []).extend(whole.logprobs)
        assert len(whole.logprobs) == len(whole.token_ids)
