"""What OpenTelemetry's standard variables cannot say is refused by name, before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import penstock
from penstock.cli.calls import command_error
from penstock.exits import EX_CONFIG
from penstock.span_export import span_processor
from penstock.tracing_variables import BATCH_VARIABLE, QUEUE_VARIABLE, SPANS_OF_AN_EXPORT
from services.config_reading import load_settings
from services.gateway.settings import GatewaySettings
from services.queue.settings import QueueSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import load_arguments
from tests.unit.client.test_tracing import Blocked

ENDPOINT = "http://127.0.0.1:9"

WRONG = [
    ("OTEL_BSP_MAX_QUEUE_SIZE", "100", "must be at least OTEL_BSP_MAX_EXPORT_BATCH_SIZE, 512, not 100"),
    ("OTEL_BSP_MAX_QUEUE_SIZE", "many", "must be a whole number from 1 on, not 'many'"),
    ("OTEL_BSP_SCHEDULE_DELAY", "0", "must be a whole number from 1 on, not '0'"),
    ("OTEL_BSP_EXPORT_TIMEOUT", "1.5", "must be a whole number from 1 on, not '1.5'"),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "5s", "must be a number of seconds above 0, not '5s'"),
    ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "", "must be a number of seconds above 0, not ''"),
    ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "must be 'gzip', not 'zip'; without it nothing is compressed"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1:4317", "Invalid IPv6 URL"),
    ("OTEL_SPAN_EVENT_COUNT_LIMIT", "few", "must be a non-negative integer but got few"),
]

SERVICES: dict[str, Callable[[], object]] = {
    "penstock queue": lambda: load_settings(QueueSettings, "penstock queue", []),
    "scheduler": lambda: load_settings(SchedulerSettings, "scheduler", []),
    "penstock gateway": lambda: load_settings(GatewaySettings, "penstock gateway", []),
    "penstock worker": lambda: load_arguments(["--model", "m"]),
}


@pytest.fixture(autouse=True)
def _an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", ENDPOINT)


@pytest.mark.parametrize("program", SERVICES)
@pytest.mark.parametrize(("name", "value", "fault"), WRONG)
def test_a_service_ends_with_the_status_of_a_wrong_setting(
    program: str, name: str, value: str, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        SERVICES[program]()
    assert ended.value.code == EX_CONFIG
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{program}: {name}")
    assert said.endswith(fault)


@pytest.mark.parametrize(("name", "value", "fault"), WRONG)
async def test_a_client_raises_an_error_of_its_own(
    name: str, value: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(penstock.TracingError, match=name) as refused:
        penstock.Client()
    assert str(refused.value).endswith(fault)
    assert command_error(refused.value).status == EX_CONFIG


@pytest.mark.parametrize("off", [("OTEL_EXPORTER_OTLP_ENDPOINT", ""), ("OTEL_SDK_DISABLED", "true")])
async def test_what_nothing_is_exported_by_is_not_judged(off: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5s")
    monkeypatch.setenv(*off)
    await penstock.Client().close()
    load_settings(QueueSettings, "penstock queue", [])


@pytest.mark.parametrize("most", [SPANS_OF_AN_EXPORT - 1, SPANS_OF_AN_EXPORT])
def test_the_least_that_may_wait_is_what_an_export_takes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, str(most))
    if most < SPANS_OF_AN_EXPORT:
        with pytest.raises(ValueError, match="max_export_batch_size"):
            span_processor(Blocked())
        monkeypatch.setenv(BATCH_VARIABLE, str(most))
    load_settings(QueueSettings, "penstock queue", [])
    processor = span_processor(Blocked())
    assert isinstance(processor, BatchSpanProcessor)
    processor.shutdown()  # type: ignore[no-untyped-call]
