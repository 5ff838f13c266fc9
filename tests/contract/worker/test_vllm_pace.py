"""How much vLLM holds back of a run, and how what it hands over is read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm


class Sequence:
    """One in the records of vLLM's front-end, which holds tokens back as vLLM does."""

    def __init__(self, interval: int) -> None:
        self.stream_interval, self.sent_tokens_offset = interval, 0
        self.detokenizer = self
        self.output_token_ids: list[int] = []
        self.told: list[int] = []
        self.queue = SimpleNamespace(put=self.told.append)

    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def generate(self) -> bool:
        """Generate a token; return whether something is handed over."""
        self.output_token_ids.append(0)
        output = self.make_request_output([0], None, None, None)
        if output is not None:
            self.told.append(output)
        return output is not None

    def make_request_output(self, new: list[int], *_: object) -> int | None:
        generated = len(self.output_token_ids)
        if self.stream_interval > 1:
            if self.sent_tokens_offset and generated - self.sent_tokens_offset < self.stream_interval:
                return None
            self.sent_tokens_offset = generated
        return generated


@pytest.mark.parametrize(
    ("most", "wanted", "told"),
    [
        (12, [0], [1, 13, 25, 37]),
        (12, [20, 33, 0], [1, 13, 20, 32, 33, 45]),
        (12, [40, 0], [1, 13, 25, 37, 40]),
        (1 << 30, [20, 33, 0], [1, 20, 33]),
        (1 << 30, [0], [1]),
        (1, [20, 0], list(range(1, 49))),
    ],
)
def test_a_run_comes_when_it_is_wanted_however_little_may_be_held_back(
    most: int, wanted: list[int], told: list[int]
) -> None:
    from services.worker.vllm.pace import Pace

    records = SimpleNamespace(external_req_ids={"r": ["r-0"]}, request_states={})
    pace = Pace(SimpleNamespace(output_processor=records))
    first = wanted[0]
    interval = pace.begin("r", first, most)
    assert interval is not None
    sequence = records.request_states["r-0"] = Sequence(interval)
    for length in range(1, 49):
        if sequence.generate():
            pace.handed_over("r", first, length == 1)
        if length == wanted[0] and len(wanted) > 1:
            pace.change("r", wanted[1])
            wanted = wanted[1:]
    assert sequence.told == told
    pace.end("r")
    assert not pace._wanted
    assert not pace._most_held


@pytest.mark.parametrize("top", [0, 1, 3, -1])
def test_lists_of_them_are_read_as_objects_are(top: int) -> None:
    from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs
    from vllm.outputs import CompletionOutput

    from services.worker.vllm.logprobs import of_choice

    likeliest = [(5, -0.5), (6, -1.0), (7, -1.0), (8, -9.0)]
    count = len(likeliest) if top < 0 else top
    for sampled, rank in ((5, 1), (7, 3), (9, 5)):
        read = []
        for flat in (False, True):
            kept = create_sample_logprobs(flat)
            ids = [sampled, *(token_id for token_id, _ in likeliest[:count])]
            values = [dict(likeliest).get(sampled, -20.0), *(value for _, value in likeliest[:count])]
            append_logprobs_for_next_position(kept, ids, values, map(str, ids), rank, top)
            read.append(of_choice(CompletionOutput(0, "", [sampled], None, kept), top))
        assert read[0] == read[1]
        assert len(read[0]) == 1


@pytest.mark.parametrize(
    ("top", "n", "most"),
    [(None, 1, 1 << 30), (0, 1, 256), (1, 1, 128), (20, 1, 12), (20, 3, 4), (20, 16, 1), (-1, 1, 1)],
)
def test_the_more_there_are_for_each_token_the_fewer_are_held_back(top: int | None, n: int, most: int) -> None:
    from vllm import SamplingParams

    from services.worker.vllm.logprobs import most_held_back

    assert most_held_back(SamplingParams(logprobs=top, n=n)) == most


@pytest.mark.parametrize(("top", "size"), [(0, 256), (20, 12), (-1, 1)])
def test_those_of_a_prompt_are_told_once_and_in_pieces(top: int, size: int) -> None:
    from vllm.logprobs import Logprob, create_prompt_logprobs
    from vllm.outputs import RequestOutput

    from services.worker.vllm.logprobs import PromptLogprobs

    ids = list(range(7, 607))
    positions = create_prompt_logprobs(True)
    for token_id in ids[1:]:
        positions.append({token_id: Logprob(-1.0, 1, "it")})
    output = RequestOutput("r", None, ids, positions, [], False)
    of_prompt = PromptLogprobs(top, str)
    pieces = [step.prompt_logprobs for step in of_prompt.pieces(output)]
    assert {len(piece) for piece in pieces[:-1]} == {size}
    told = [entry for piece in pieces for entry in piece]
    assert [entry.token_id for entry in told] == ids
    assert (told[0].token, told[0].rank) == ("7", 0)
    assert {(entry.token, entry.rank) for entry in told[1:]} == {("it", 1)}
    assert not list(of_prompt.pieces(output)), "another completion brings the same"
    assert not list(PromptLogprobs(None, str).pieces(output))
