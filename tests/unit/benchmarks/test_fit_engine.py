"""What the engine model is fitted to is what its profiles are of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.devices import CUDA
from benchmarks.fit_engine import SUBJECTS, make
from services.worker.simulated.profile import PROFILES

FORMATS = {"cpu-tiny": "float32", "cpu-small": "bfloat16"}
"""Of the weights, as docs/engine-model.md has them."""


@pytest.mark.parametrize("profile", FORMATS)
def test_a_model_and_its_engine_have_the_format_of_the_profile(profile: str, tmp_path: Path) -> None:
    subject = SUBJECTS[profile]
    made = json.loads((make(tmp_path, subject) / "config.json").read_text())
    assert made["torch_dtype"] == subject.device.dtype == FORMATS[profile]


def test_every_profile_that_is_measured_is_one() -> None:
    assert set(SUBJECTS) <= set(PROFILES)
    assert {name for name, subject in SUBJECTS.items() if subject.device is not CUDA} == set(FORMATS)
