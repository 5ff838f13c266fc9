"""A service that has done nothing shows what it will count: each label value that is known, at 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.auth.keyring import Reason
from services.queue.core.lifecycle import Outcome
from services.scheduler.core.lifecycle import Event
from tests.integration.conftest import SIMULATED_FLAGS
from tests.integration.test_metrics import samples
from tests.support.fleet import Fleet, Service
from tests.support.promql import PAGE, ROW
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

CHANNELS = {"interactive", "batch"}
ENDPOINTS = {"/v1/chat/completions", "/v1/completions"}
STATUSES = {"200", "400", "429", "499", "500", "503"}
REASONS = {reason.value for reason in Reason}
RELEASES = {
    "completed",
    "rejected",
    "cancelled",
    "expired",
    "failed",
    "claim_refused",
    "lease_lost",
    "recalled",
    "unclaimed",
}
REFUNDS = RELEASES | {"tokenizer_ack", "epoch_end", "standing_unused"}
KNOWN: dict[str, dict[str, set[str]]] = {
    "penstock_queue_accepted_total": {"channel": CHANNELS},
    "penstock_queue_ended_total": {"channel": CHANNELS, "outcome": {outcome.name.lower() for outcome in Outcome}},
    "penstock_queue_auth_refused_total": {"reason": REASONS},
    "penstock_queue_config_reloads_total": {"outcome": {"applied", "unchanged", "refused"}},
    "penstock_queue_refused_claims_total": {"reason": {"leased", "ended", "unknown", "too_many"}},
    "penstock_queue_refused_submits_total": {"cause": {"invalid", "over_quota", "unavailable"}},
    "penstock_queue_requeues_total": {
        "channel": CHANNELS,
        "cause": {"fail", "lease_expired", "worker_lost", "give_back", "requeue"},
    },
    "penstock_scheduler_auth_refused_total": {"reason": REASONS},
    "penstock_scheduler_config_reloads_total": {"outcome": {"applied", "unchanged", "refused"}},
    "penstock_scheduler_duplicate_acks_total": {"kind": {"tokenizer_ack", "completion_ack", "second_release"}},
    "penstock_scheduler_grants_total": {"channel": CHANNELS},
    "penstock_scheduler_refunded_blocks_total": {"cause": REFUNDS},
    "penstock_scheduler_refunds_total": {"cause": REFUNDS},
    "penstock_scheduler_refused_events_total": {"event": {event.value for event in Event}},
    "penstock_scheduler_rejected_requests_total": {"code": {"context_length_exceeded", "pool_too_small"}},
    "penstock_scheduler_stale_messages_total": {
        "kind": {"grant_used", "engine_report", "tokenizer_ack", "completion_ack", "leaving"}
    },
    "penstock_scheduler_standing_grants_used_total": {"channel": CHANNELS},
    "penstock_scheduler_unknown_acks_total": {"kind": {"grant_used", "tokenizer_ack", "completion_ack"}},
    "penstock_worker_releases_total": {"cause": RELEASES},
    "penstock_gateway_requests_total": {"endpoint": ENDPOINTS, "status": STATUSES},
    "penstock_gateway_uploads_total": {"status": STATUSES},
    "penstock_gateway_ended_batches_total": {"status": {"completed", "failed", "expired", "cancelled"}},
    "penstock_gateway_batch_lines_total": {"step": {"submitted", "completed", "failed"}},
}
OF_EACH_WORKER = {"penstock_scheduler_target_preemptions_total", "penstock_scheduler_worker_preemptions_total"}
"""Born with the worker, whose name nobody knows before."""


def found(services: tuple[Service, ...]) -> dict[str, list[dict[str, str]]]:
    """Return the labels of each series of each counter."""
    series: dict[str, list[dict[str, str]]] = {}
    for service in services:
        for sample in samples(service):
            series.setdefault(sample.name, []).append(sample.labels)
    return series


def test_each_value_that_is_known_has_its_series_before_anything_happens(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    services = (fleet.queue, fleet.scheduler, fleet.add_worker("w1", SIMULATED_FLAGS), fleet.add_gateway())
    wait_for(lambda: KNOWN.keys() <= found(services).keys(), "every service to have looked at itself")
    series = found(services)
    for name, labels in KNOWN.items():
        combinations = 1
        for label, values in labels.items():
            assert {of[label] for of in series[name]} == values, (name, label)
            combinations *= len(values)
        assert len(series[name]) == combinations, name


def test_no_counter_with_labels_is_left_out() -> None:
    counters = {name for name, kind, labels in ROW.findall(PAGE.read_text()) if kind == "counter" and labels != "–"}
    assert counters == KNOWN.keys() | OF_EACH_WORKER
