"""How often vLLM hands over the output of a run: no more often than somebody wants to hear of it.

Each output that AsyncLLM hands over wakes the run's task and builds objects on the way; for a batch of a hundred
sequences that costs the front-end as much as everything else it does in a step. vLLM can hold tokens back
(`SamplingParams.stream_interval`), with an interval that is fixed when the request is added. What the worker wants
changes while a run goes on, so the interval is changed in the front-end's own record of the request. That record is
no public interface: where it does not look as expected, every step is handed over.
"""

from __future__ import annotations

import inspect
from typing import Any

AT_THE_END = 1 << 30
"""An interval in tokens that no output reaches."""


def supported(processor: Any) -> bool:
    """Whether this vLLM keeps its records as this module expects them."""
    from vllm import SamplingParams
    from vllm.v1.engine.output_processor import RequestState

    parameters = inspect.signature(RequestState.make_request_output).parameters
    return (
        hasattr(processor, "external_req_ids")
        and hasattr(processor, "request_states")
        and "stream_interval" in SamplingParams.__struct_fields__
        and [*parameters][1:5] == ["new_token_ids", "pooling_output", "finish_reason", "stop_reason"]
    )


def first_interval(tell_at_tokens: int) -> int:
    """Return the interval that hands over the first token, and then nothing before the output has so many."""
    return AT_THE_END if tell_at_tokens == 0 else max(tell_at_tokens - 1, 1)


class Pace:
    """The pace of every run, by its length at the next output; 0 means its end, 1 every step."""

    def __init__(self, llm: Any) -> None:
        """Read the records of `llm`'s front-end."""
        self._processor: Any = getattr(llm, "output_processor", None)
        self._supported = supported(self._processor)
        self._wanted: dict[str, int] = {}
        self._most_held: dict[str, int] = {}
        """Tokens that may be held back at once, of runs where that is not any number."""

    def begin(self, run_id: str, tell_at_tokens: int, most_held: int = AT_THE_END) -> int | None:
        """Return the stream interval to add a run with; None leaves it to the engine's settings.

        Of each completion `most_held` tokens are held back at most.
        """
        if not self._supported:
            return None
        self._wanted[run_id] = tell_at_tokens
        if most_held < AT_THE_END:
            self._most_held[run_id] = most_held
        return min(first_interval(tell_at_tokens), most_held)

    def change(self, run_id: str, tell_at_tokens: int) -> None:
        """Change the pace of a run; one that vLLM does not know yet gets it with its first token."""
        if run_id in self._wanted:
            self._wanted[run_id] = tell_at_tokens
            self.apply(run_id)

    def apply(self, run_id: str) -> None:
        """Write the pace that is wanted into vLLM's records of a run."""
        if not self._supported:
            return
        tokens = self._wanted[run_id]
        most_held = self._most_held.get(run_id, AT_THE_END)
        for name in self._processor.external_req_ids.get(run_id, ()):
            state = self._processor.request_states.get(name)
            if state is not None:
                set_interval(state, tokens, most_held)

    def handed_over(self, run_id: str, tell_at_tokens: int, first: bool) -> None:
        """Write the pace again after an output, the `first` perhaps, of a run that began with `tell_at_tokens`.

        It changed before vLLM knew the run, or the output came before it was wanted, as no more was to be held back.
        """
        if run_id in self._most_held or (first and self._wanted.get(run_id, 1) != tell_at_tokens):
            self.apply(run_id)

    def end(self, run_id: str) -> None:
        """Forget a run."""
        self._wanted.pop(run_id, None)
        self._most_held.pop(run_id, None)


def set_interval(state: Any, tell_at_tokens: int, most_held: int) -> None:
    """Have one sequence handed over next when it has `tell_at_tokens`; hand over at once what is overdue.

    It is handed over before that where `most_held` tokens have been held back. vLLM holds tokens back, and knows how
    many it has handed over, only while the interval is above 1.
    """
    generated = state.detokenizer.num_output_tokens()
    sent = state.sent_tokens_offset if state.stream_interval > 1 else generated
    if tell_at_tokens == 0 or tell_at_tokens > generated + 1:
        state.sent_tokens_offset = sent
        # The first token is handed over whatever the interval is.
        interval = AT_THE_END if tell_at_tokens == 0 else max(tell_at_tokens - max(sent, 1), 1)
        state.stream_interval = min(interval, most_held)
        return
    state.stream_interval = 1
    held_back = state.detokenizer.output_token_ids[sent:]
    output = state.make_request_output(held_back, None, None, None) if held_back else None
    if output is not None:
        state.queue.put(output)
