"""What Grafana's dashboard shows: every panel with its queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

RATE = "[$__rate_interval]"
"""Grafana's own choice: at least four scrapes."""

QUANTILES = (("0.5", "p50"), ("0.99", "p99"))


class Panel(NamedTuple):
    """One panel. `queries` are (PromQL, legend); `thresholds` are (from, color) of a panel that shows one number."""

    title: str
    unit: str
    description: str
    queries: Sequence[tuple[str, str]]
    stat: bool = False
    thresholds: Sequence[tuple[float, str]] = ()
    stacked: bool = False


class Row(NamedTuple):
    """A heading and the panels below it, so many beside each other."""

    title: str
    panels: Sequence[Panel]
    columns: int = 3


def quantiles(metric: str, label: str = "") -> list[tuple[str, str]]:
    """Return the queries for the median and the 99th percentile of a histogram, for each value of `label`."""
    by = f"le, {label}" if label else "le"
    legend = f"{{{{{label}}}}} " if label else ""
    return [
        (f"histogram_quantile({q}, sum by ({by}) (rate({metric}_bucket{RATE})))", f"{legend}{name}")
        for q, name in QUANTILES
    ]


AUDITS = f"sum({' or '.join(f'penstock_{it}_audit_violations_total' for it in ('queue', 'scheduler', 'worker'))})"
"""Of all that is there: a sum with a part that is missing, as in a fleet without workers, is none."""

WELL = Row(
    "Is it well?",
    [
        Panel("Services down", "short", "Targets that Prometheus cannot scrape.",
              [('count(up{job="penstock"} == 0) or vector(0)', "")], True, [(1, "red")]),
        Panel("Audit violations", "short", "Contradictions that the services found in their own books; must be 0.",
              [(AUDITS, "")], True, [(1, "red")]),
        Panel("Drift", "short", "Blocks by which a ledger is ahead of its engine; 0 but for moments.",
              [("max(penstock_scheduler_drift_blocks)", "")], True, [(1, "orange")]),
        Panel("Dead letters", "short", "Requests whose attempts are used up; `penstock dead` lists them.",
              [("sum(penstock_queue_dead_requests)", "")], True, [(1, "orange")]),
        Panel("Preemptions in an hour", "short", "Of all workers.",
              [("sum(increase(penstock_scheduler_worker_preemptions_total[1h]))", "")], True, [(10, "orange")]),
        Panel("Free disk over watermark", "none", "Below 1 the queue refuses submits.",
              [("min(penstock_queue_disk_free_bytes / penstock_queue_disk_free_min_bytes)", "")], True),
        Panel("Waiting", "short", "Requests in line.", [("sum(penstock_queue_ready_requests)", "")], True),
        Panel("Oldest in line", "s", "Age of the request that waits longest.",
              [("max(penstock_queue_oldest_ready_age_seconds)", "")], True),
    ],
    columns=8,
)  # fmt: skip

CREDITS = Row(
    "Credits",
    [
        Panel("Credit starvation", "none", "Blocks that waiting requests are expected to need, for each block that may"
              " still be granted on the workers of their model. Above 1 requests wait for blocks.",
              [("penstock_scheduler_starvation_ratio", "{{namespace}} {{channel}} {{model}}")]),
        Panel("Blocks held", "short", "Booked by the ledgers, by worker and channel.",
              [("penstock_scheduler_held_blocks", "{{worker}} {{channel}}")], stacked=True),
        Panel("Blocks free", "short", "Not booked, and those that may still be granted.",
              [("penstock_scheduler_free_blocks", "{{worker}} free"),
               ("penstock_scheduler_grantable_blocks", "{{worker}} grantable")]),
        Panel("KV cache in use", "percentunit", "As the engines report it.",
              [("penstock_scheduler_kv_cache_usage_ratio", "{{worker}}")]),
        Panel("Predicted peak", "percentunit", "Share of the capacity that running requests will need at their"
              " fullest, margin included (policy `predictive`).",
              [("penstock_scheduler_predicted_peak_blocks / penstock_scheduler_capacity_blocks", "{{worker}}")]),
        Panel("Drift and overcommitment", "short", "Blocks.",
              [("penstock_scheduler_drift_blocks", "{{worker}} drift"),
               ("penstock_scheduler_overcommitted_blocks", "{{worker}} overcommitted")]),
    ],
)  # fmt: skip

LINES = Row(
    "Channels",
    [
        Panel("Waiting", "short", "Requests in line at the queue.",
              [("penstock_queue_ready_requests", "{{channel}}")], stacked=True),
        Panel("Oldest in line", "s", "Age of the request that waits longest.",
              [("penstock_queue_oldest_ready_age_seconds", "{{channel}}")]),
        Panel("Running", "short", "Requests leased to a worker.",
              [("penstock_queue_leased_requests", "{{channel}}")], stacked=True),
        Panel("Accepted", "reqps", "Requests accepted each second.",
              [(f"sum by (channel) (rate(penstock_queue_accepted_total{RATE}))", "{{channel}}")]),
        Panel("Ended", "reqps", "Requests ended each second.",
              [(f"sum by (outcome) (rate(penstock_queue_ended_total{RATE}))", "{{outcome}}")], stacked=True),
        Panel("Wait for a grant", "s", "From announcement to grant.",
              quantiles("penstock_scheduler_grant_wait_seconds", "channel")),
        Panel("Submitted to completed", "s", "The whole life of a request.",
              quantiles("penstock_queue_e2e_seconds", "channel")),
        Panel("Put back in line", "reqps", "Attempts that ended without a result, by cause.",
              [(f"sum by (cause) (rate(penstock_queue_requeues_total{RATE}))", "{{cause}}")]),
        Panel("Refused", "reqps", "Submits, by cause.",
              [(f"sum by (cause) (rate(penstock_queue_refused_submits_total{RATE}))", "{{cause}}")]),
    ],
)  # fmt: skip

ENGINES = Row(
    "Engines",
    [
        Panel("Time to the first token", "s", "From the engine's start with a request.",
              quantiles("penstock_worker_time_to_first_token_seconds")),
        Panel("Between two tokens", "s", "Of one sequence.", quantiles("penstock_worker_inter_token_seconds")),
        Panel("Tokens", "short", "Each second.",
              [(f"sum(rate(penstock_worker_generation_tokens_total{RATE}))", "generated"),
               (f"sum(rate(penstock_worker_prompt_tokens_total{RATE}))", "of prompts"),
               (f"sum(rate(penstock_worker_cached_tokens_total{RATE}))", "of prompts, cached")]),
        Panel("Preemptions", "short", "Each second; the engine threw out what it had begun. Policy `predictive` steers"
              " to some, to more of them where one costs little.",
              [(f"rate(penstock_scheduler_worker_preemptions_total{RATE})", "{{worker}}"),
               (f"rate(penstock_scheduler_target_preemptions_total{RATE})", "{{worker}} steered to")]),
        Panel("In the engine", "short", "Requests running, and waiting inside the engine for blocks.",
              [("penstock_scheduler_engine_running_requests", "{{worker}} running"),
               ("penstock_scheduler_engine_waiting_requests", "{{worker}} waiting")]),
        Panel("Workers", "short", "Connected, and of these draining.",
              [("sum(penstock_scheduler_worker_connected)", "connected"),
               ("sum(penstock_scheduler_worker_draining)", "draining")]),
    ],
)  # fmt: skip

GATEWAY = Row(
    "Gateway",
    [
        Panel("Generations", "reqps", "Ended each second, by status.",
              [(f"sum by (status) (rate(penstock_gateway_requests_total{RATE}))", "{{status}}")], stacked=True),
        Panel("Time to the first chunk", "s", "Of streams, from the headers on.",
              quantiles("penstock_gateway_time_to_first_token_seconds", "endpoint")),
        Panel("Open", "short", "Generations being answered, and batches that have not ended.",
              [("sum(penstock_gateway_open_requests)", "generations"),
               ("max(penstock_gateway_open_batches)", "batches")]),
    ],
)  # fmt: skip

STORE = Row(
    "Store",
    [
        Panel("Synced commit", "s", "Time of one.", quantiles("penstock_queue_commit_seconds")),
        Panel("Messages in a commit", "short", "Batching at work: more under load.",
              quantiles("penstock_queue_commit_messages")),
        Panel("Disk", "bytes", "Free, and the watermark below which submits are refused.",
              [("penstock_queue_disk_free_bytes", "free"), ("penstock_queue_disk_free_min_bytes", "watermark")]),
    ],
)  # fmt: skip

PROCESSES = Row(
    "Processes",
    [
        Panel("Memory", "bytes", "Resident.",
              [('process_resident_memory_bytes{job="penstock"}', "{{service}} {{instance}}")]),
        Panel("CPU", "percentunit", "Of one core.",
              [(f'rate(process_cpu_seconds_total{{job="penstock"}}{RATE})', "{{service}} {{instance}}")]),
        Panel("Open files", "short", "Sockets included.",
              [('process_open_fds{job="penstock"}', "{{service}} {{instance}}")]),
        Panel("Lost spans", "short", "A second: no collector got them.",
              [(f'rate(penstock_lost_spans_total{{job="penstock"}}{RATE})', "{{service}} {{instance}}")]),
    ],
    columns=4,
)  # fmt: skip

ROWS = (WELL, CREDITS, LINES, ENGINES, GATEWAY, STORE, PROCESSES)
