"""vLLM's V1 scheduler without a model: every sequence that is through its known tokens gets one made-up token."""

from __future__ import annotations

from typing import Any

from tests.support.replay import Step, Timetable, Workload, name_of

TOKENS_PER_REQUEST = 100_000
"""Made-up tokens of request n start at n + 1 times this, so that no two requests ever have an output block in common,
nor one and a prompt."""


def tiny_config(model: str) -> Any:
    """Return vLLM's configuration for a tiny model with a 2,048-token window."""
    from vllm import AsyncEngineArgs

    return AsyncEngineArgs(
        model=model, dtype="float32", enforce_eager=True, max_model_len=2048, block_size=32, skip_tokenizer_init=True
    ).create_engine_config()


def apply_rules(scheduler_config: Any, workload: Workload) -> None:
    """Set the workload's rules in vLLM's scheduler configuration."""
    rules = workload.rules
    scheduler_config.max_num_seqs = workload.max_num_seqs
    scheduler_config.max_num_batched_tokens = workload.max_num_batched_tokens
    scheduler_config.watermark = rules.watermark
    scheduler_config.long_prefill_token_threshold = rules.long_prefill_token_threshold
    scheduler_config.scheduler_reserve_full_isl = rules.scheduler_reserve_full_isl
    scheduler_config.policy = rules.scheduling_policy


def kv_cache(workload: Workload, sliding_tokens: int = 0) -> Any:
    """Return what vLLM makes of the workload's blocks for layers with attention, to all or to so many tokens."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    sizes: dict[str, Any] = {
        "block_size": workload.block_size, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32,
    }  # fmt: skip
    sliding = SlidingWindowSpec(**sizes, sliding_window=sliding_tokens) if sliding_tokens else None
    # The null block is one of vLLM's.
    group = KVCacheGroupSpec(["layer"], sliding or FullAttentionSpec(**sizes))
    return KVCacheConfig(workload.blocks + 1, [], [group])


def make_scheduler(config: Any, workload: Workload, sliding_tokens: int = 0) -> Any:
    """Return vLLM's scheduler with the workload's blocks and rules."""
    from vllm.v1.structured_output import StructuredOutputManager

    from services.worker.vllm.scheduling import let_guaranteed_pass

    apply_rules(config.scheduler_config, workload)
    config.scheduler_config.scheduler_cls = None
    let_guaranteed_pass(config)
    config.cache_config.enable_prefix_caching = workload.rules.enable_prefix_caching
    config.cache_config.num_gpu_blocks = workload.blocks + 1
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv_cache(workload, sliding_tokens),
        structured_output_manager=StructuredOutputManager(config),
        block_size=workload.block_size,
        hash_block_size=workload.block_size,
    )


def through_scheduler(config: Any, workload: Workload) -> list[Step]:
    """Run a workload through vLLM's scheduler."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request, RequestStatus

    init_none_hash(sha256)
    hasher = get_request_block_hasher(workload.block_size, sha256)
    scheduler = make_scheduler(config, workload)
    table = Timetable(workload.arrivals)
    steps: list[Step] = []
    while scheduler.has_unfinished_requests() or table.more:
        added, aborted = table.due(len(steps), not scheduler.has_unfinished_requests())
        for number in added:
            arrival = workload.arrivals[number]
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
            request = Request(
                name_of(number), list(arrival.prompt_ids), params, None,
                arrival_time=float(number) if arrival.arrived_s is None else arrival.arrived_s,
                priority=arrival.priority, block_hasher=hasher,
            )  # fmt: skip
            scheduler.add_request(request)
        for name in in_order(scheduler, {name_of(number) for number in aborted}):
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        scheduler.update_from_output(output, made_up_tokens(scheduler, output))
        steps.append(step_of(scheduler, output))
    return steps


def in_order(scheduler: Any, names: set[str]) -> list[str]:
    """Return names in the order in which the requests run, then those that wait.

    vLLM frees the blocks of requests that are aborted together in that of a set.
    """
    running = [request.request_id for request in scheduler.running if request.request_id in names]
    return [*running, *names.difference(running)]


def made_up_tokens(scheduler: Any, output: Any) -> Any:
    """Return what a model runner would: a token for each request whose known tokens are all computed."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    sampled: list[list[int]] = []
    for name in names:
        request = scheduler.requests[name]
        through = request.num_computed_tokens >= request.num_tokens
        token = (int(name[1:]) + 1) * TOKENS_PER_REQUEST + request.num_tokens
        sampled.append([token] if through else [])
    return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)


def step_of(scheduler: Any, output: Any) -> Step:
    """Return what a scheduler's step did, after its output has been taken in; names lose what vLLM appends."""

    resumed = set(output.scheduled_cached_reqs.resumed_req_ids)
    admitted = {request.req_id for request in output.scheduled_new_reqs} | resumed
    return Step(
        output.total_num_scheduled_tokens,
        [_short(name) for name in output.num_scheduled_tokens if name in admitted],
        sorted(_short(name) for name in output.preempted_req_ids or ()),
        [(_short(request.request_id), request.num_computed_tokens) for request in scheduler.running],
        [_short(request.request_id) for request in scheduler.waiting],
        scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    )


def _short(name: str) -> str:
    return name.partition("-")[0]
