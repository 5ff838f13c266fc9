"""What a worker refuses for the engine's sampler, against what the sampler of vLLM's second model runner raises for.

The sampler's checks run without a GPU: their tables are stand-ins that take whatever is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from penstock.tiny_model import make_tiny_model
from services.worker.engine import RequestRefusedError

pytestmark = pytest.mark.vllm

END_IDS = [2, 7, 9]
VOCABULARY = 2048


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")))


def config(second_runner: bool = True, end_ids: Sequence[int] = END_IDS, vocabulary: int = VOCABULARY) -> Any:
    model = SimpleNamespace(
        try_get_generation_config=lambda: {"eos_token_id": end_ids}, get_vocab_size=lambda: vocabulary
    )
    return SimpleNamespace(use_v2_model_runner=second_runner, model_config=model)


def as_the_engine_gets_it(tokenizer: Any, **fields: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams.from_optional(**fields)
    params.update_from_generation_config({"eos_token_id": END_IDS}, tokenizer.eos_token_id)
    params.update_from_tokenizer(tokenizer)
    return params


def sampler_takes(params: Any) -> bool:
    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

    try:
        LogitBiasState.add_request(MagicMock(), 0, params)
        BadWordsState.add_request(MagicMock(), 0, params)
    except ValueError:
        return False
    return True


def refused_field(tokenizer: Any, second_runner: bool = True, model: Any = None, **fields: Any) -> str | None:
    from vllm import SamplingParams

    from services.worker.vllm.sampler_room import SamplerRoom

    room = SamplerRoom(model or config(second_runner), tokenizer)
    try:
        room.refuse_beyond(SamplingParams.from_optional(**fields))
    except RequestRefusedError as refused:
        return refused.param
    return None


def stop_tokens(count: int) -> dict[str, Any]:
    return {"min_tokens": 1, "stop_token_ids": list(range(100, 100 + count)), "max_tokens": 8}


def test_stop_tokens_are_refused_from_where_the_sampler_raises(tokenizer: Any) -> None:
    room = 128 - len({*END_IDS, tokenizer.eos_token_id})
    assert sampler_takes(as_the_engine_gets_it(tokenizer, **stop_tokens(room)))
    assert refused_field(tokenizer, **stop_tokens(room)) is None
    assert not sampler_takes(as_the_engine_gets_it(tokenizer, **stop_tokens(room + 1)))
    assert refused_field(tokenizer, **stop_tokens(room + 1)) == "sampling.stop_token_ids"
    without_least = stop_tokens(1000) | {"min_tokens": 0}
    assert sampler_takes(as_the_engine_gets_it(tokenizer, **without_least))
    assert refused_field(tokenizer, **without_least) is None


def test_bad_words_are_refused_from_where_the_sampler_raises(tokenizer: Any) -> None:
    def words(count: int) -> dict[str, Any]:
        return {"bad_words": ["gate " * count]}

    counts = range(100, 2000, 50)
    refusals = [refused_field(tokenizer, **words(count)) for count in counts]
    assert [refused is None for refused in refusals] == [
        sampler_takes(as_the_engine_gets_it(tokenizer, **words(count))) for count in counts
    ]
    assert set(refusals) == {None, "sampling.bad_words"}


def test_an_engine_with_the_first_runner_takes_them(tokenizer: Any) -> None:
    assert refused_field(tokenizer, second_runner=False, bad_words=["gate " * 2000], **stop_tokens(1000)) is None


def test_what_vllm_itself_says_of_bad_words_is_said_of_the_field(tokenizer: Any) -> None:
    assert refused_field(tokenizer, bad_words=[f"gate{number}" for number in range(1000)]) == "sampling.bad_words"


@pytest.mark.parametrize("second_runner", [False, True])
def test_min_tokens_are_refused_where_an_end_of_the_output_has_no_logit(tokenizer: Any, second_runner: bool) -> None:
    least: dict[str, Any] = {"min_tokens": 3, "max_tokens": 8}
    unknown = config(second_runner, [2, VOCABULARY])
    assert refused_field(tokenizer, model=unknown, **least) == "sampling.min_tokens"
    assert refused_field(tokenizer, model=unknown, max_tokens=8) is None
    assert refused_field(tokenizer, model=config(second_runner, [2, VOCABULARY - 1]), **least) is None


def test_the_first_runners_sampler_ends_of_a_token_without_a_logit() -> None:
    import torch
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    processor = MinTokensLogitsProcessor(MagicMock(), torch.device("cpu"), False)
    processor.min_toks = {0: (3, [], {VOCABULARY}, False)}
    processor.logits_slice = (torch.tensor([0]), torch.tensor([VOCABULARY]))
    with pytest.raises(IndexError):
        processor.apply(torch.zeros(1, VOCABULARY))


def test_bad_words_without_a_logit_are_refused_for_the_second_runner(tokenizer: Any) -> None:
    word = tokenizer.decode([400])
    known = max(tokenizer.encode(word, add_special_tokens=False) + tokenizer.encode(f" {word}")) + 1
    for vocabulary, field in ((known, None), (known - 1, "sampling.bad_words")):
        assert refused_field(tokenizer, model=config(vocabulary=vocabulary), bad_words=[word]) == field
    assert refused_field(tokenizer, model=config(False, vocabulary=known - 1), bad_words=[word]) is None
