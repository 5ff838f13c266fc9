"""Profiles with other constants: each is varied by itself, and the policies are compared under every one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from benchmarks.admission import sensitivity, sim, workloads
from services.worker.simulated.profile import PROFILES, Fitted, Roofline


def test_each_assumption_of_a_gpu_is_varied_by_itself() -> None:
    profile = PROFILES["h200-llama-70b-tp8"]
    assert isinstance(profile, Roofline)
    found = list(sensitivity.variations(profile, 1 / 3))
    assert found[0] == (sensitivity.AS_IT_IS, 1.0, profile)
    assert [name for name, _, _ in found[1::2]] == list(profile.assumed._fields)
    for name, factor, varied in found[1:]:
        assert isinstance(varied, Roofline)
        assert varied._replace(assumed=profile.assumed) == profile
        before, after = profile.assumed._asdict(), varied.assumed._asdict()
        assert [field for field in before if before[field] != after[field]] == [name]
        assert after[name] == pytest.approx(before[name] * factor)


def test_of_a_fit_what_is_nothing_is_left_out() -> None:
    found = list(sensitivity.variations(Fitted(0.01, 0.0, 1e-5, num_blocks=64), 0.5))
    assert [name for name, _, _ in found] == [sensitivity.AS_IT_IS, *["step"] * 2, *["per_prefill_token"] * 2]
    assert [profile.step for _, _, profile in found if isinstance(profile, Fitted)][:3] == [0.01, 0.005, 0.015]


def test_every_policy_is_told_under_every_variation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sensitivity", "--requests", "40", "--scale", "cpu", "--seeds", "0,1"])
    sensitivity.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    constants = [sensitivity.AS_IT_IS, *["step"] * 2, *["per_sequence"] * 2, *["per_prefill_token"] * 2]
    assert [line["constant"] for line in lines[::3]] == constants
    assert [line["policy"] for line in lines[:3]] == ["push", "watermark-0.02", "predictive"]
    assert all(line["rps_ratio_vs_push"] == 1 for line in lines[::3])


def test_the_same_requests_run_on_an_engine_that_is_another() -> None:
    scale = workloads.SCALES["cpu"]
    elapsed_s = []
    for _, _, speed in sensitivity.variations(PROFILES[scale.profile], 0.5):
        made = workloads.of_seeds("kv-bound", 20, replace(scale, speed=speed), (0,))
        elapsed_s.append(sim.run("push", made[0]).elapsed_s)
    assert len(set(elapsed_s)) == len(elapsed_s)
