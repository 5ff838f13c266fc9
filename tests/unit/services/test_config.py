"""Settings: where they come from, and how wrong ones are told."""

from __future__ import annotations

import pytest

from services.config import EX_CONFIG, ChannelledSettings, load_settings


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Load settings that are wrong; return what was said."""
    with pytest.raises(SystemExit) as ending:
        load_settings(ChannelledSettings, "queue", arguments)
    assert ending.value.code == EX_CONFIG
    return capsys.readouterr().err


def test_the_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CHANNELS", '{"a": {}}')
    assert set(load_settings(ChannelledSettings, "queue", []).channels) == {"a"}
    flags = ["--penstock-channels", '{"b": {"weight": 2}}']
    assert load_settings(ChannelledSettings, "queue", flags).channels["b"].weight == 2


@pytest.mark.parametrize(
    ("channels", "said"),
    [
        ('{"a": {"weight": ', "PENSTOCK_CHANNELS: not valid JSON"),
        ('{"a": {"weight": 0}}', "PENSTOCK_CHANNELS.a.weight"),
        ('{"a": {"wait": 1}}', "PENSTOCK_CHANNELS.a.wait"),
        ("{}", "at least one channel"),
        ('{"a": {"guaranteed_share": 0.6}, "b": {"guaranteed_share": 0.6}}', "adds up to 1.2"),
        ('{"a": {"guaranteed_share": 0.5, "ceiling_share": 0.4}}', "ceiling_share is below"),
    ],
)
def test_wrong_channels_are_told_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], channels: str, said: str
) -> None:
    monkeypatch.setenv("PENSTOCK_CHANNELS", channels)
    assert said in refused(capsys, [])


def test_unknown_flags_and_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--nonsense" in refused(capsys, ["--nonsense", "1"])
    assert "log_level" in refused(capsys, ["--log-level", "loud"])
