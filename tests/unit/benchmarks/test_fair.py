"""A benchmark tells no figure of work that was not done."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import bench_batch_files, bench_first_byte, bench_main, bench_ratio
from benchmarks.lifecycle import report
from benchmarks.lifecycle.measure import Cost, Round
from tests.support.ports import free_port

PLAIN = {"requests": 4, "elapsed_s": 2.0, "preemptions": 1, "kv_usage": 0.5, "completion_tokens": 40}
PENSTOCK = {**PLAIN, "elapsed_s": 4.0, "outcomes": {"completed": 4}}


def test_a_ratio_is_of_the_same_work() -> None:
    assert bench_ratio.report({"plain": [PLAIN], "penstock": [PENSTOCK]}, "p")["rps_ratio_vs_plain"] == 0.5


@pytest.mark.parametrize(
    "less", [{"outcomes": {"completed": 3, "rejected": 1}}, {"completion_tokens": 39}, {"outcomes": {"completed": 3}}]
)
def test_a_round_that_did_less_gives_no_ratio(less: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="penstock"):
        bench_ratio.report({"plain": [PLAIN], "penstock": [{**PENSTOCK, **less}]}, "p")


@pytest.mark.parametrize(
    ("failed", "wrong_length", "said"),
    [(0, 0, None), (3, 0, "3 of 9 requests failed"), (0, 2, "2 have another length")],
)
def test_the_main_job_with_failed_requests_ends_as_failed(
    failed: int,
    wrong_length: int,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"benchmark": "main", "failed": failed, "wrong_length": wrong_length}
    monkeypatch.setattr(bench_main, "run", lambda *_arguments: found)
    monkeypatch.setattr(sys, "argv", ["main", "--requests", "9"])
    if said is None:
        bench_main.main()
    else:
        with pytest.raises(SystemExit, match=said):
            bench_main.main()
    assert '"benchmark": "main"' in capsys.readouterr().out


def test_a_probe_without_an_answer_is_no_short_one() -> None:
    probe = bench_batch_files.Probe(f"127.0.0.1:{free_port()}")
    probe._thread.join(60)
    with pytest.raises(SystemExit, match="did not answer"):
        probe.take_s()
    probe.stop()


@pytest.mark.parametrize(
    ("statuses", "text"),
    [(["validating", "finalizing"], "finalizing before the streams had ended"), (["in_progress"] * 9, "validated")],
)
def test_a_batch_that_is_too_short_is_said_to_be(
    statuses: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_first_byte, "first_byte_s", lambda _address: 0.01)
    path = tmp_path / "input.jsonl"
    path.touch()
    left = iter(statuses)
    batches = SimpleNamespace(
        create=lambda **_: SimpleNamespace(id="b"),
        retrieve=lambda _id: SimpleNamespace(status=next(left), request_counts=None),
        cancel=lambda _id: None,
    )
    client: Any = SimpleNamespace(batches=batches, files=SimpleNamespace(create=lambda **_: SimpleNamespace(id="f")))
    with pytest.raises(SystemExit, match=text):
        bench_first_byte._round(client, "nowhere", path, 2)


@pytest.mark.parametrize("ours", ["penstock", "penstock-compiled"])
def test_others_are_compared_with_penstock_compiled_or_not(ours: str) -> None:
    def rounds(seconds: float) -> list[Round]:
        return [Round(Cost(10, seconds, {"client": 1.0}, 1.0), [0.02], [0.01])]

    found = report.comparison({ours: rounds(2.0), "redis": rounds(1.0)}, {ours: "", "redis": ""})
    assert found["rps_ratio_vs_redis"]["median"] == 0.5
    assert found["lone_added_ms"]["p50"] == 10.0
    assert "compiled_vs_interpreted" not in found
