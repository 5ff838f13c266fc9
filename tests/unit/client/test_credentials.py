"""The key of a command or a client comes from the environment as a service's does."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.credentials import key_from_environment
from penstock.keys import KeysError


def test_the_key_is_in_the_variable_or_in_the_file_it_names(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("penstock.ci.secret\n")
    assert key_from_environment({}) == ""
    assert key_from_environment({"PENSTOCK_KEY": "k"}) == "k"
    assert key_from_environment({"PENSTOCK_KEY_FILE": str(file)}) == "penstock.ci.secret"
    assert key_from_environment({"PENSTOCK_KEY": "k", "PENSTOCK_KEY_FILE": ""}) == "k"


def test_what_is_wrong_with_the_key_file_is_told_without_its_content(tmp_path: Path) -> None:
    file, latin = tmp_path / "key", tmp_path / "latin"
    file.write_text("schlüssel", encoding="utf-8")
    latin.write_text("schlüssel", encoding="latin-1")
    for environment, said in (
        ({"PENSTOCK_KEY": "k", "PENSTOCK_KEY_FILE": str(file)}, "are both set; one must go"),
        ({"PENSTOCK_KEY_FILE": str(tmp_path / "none")}, "No such file"),
        ({"PENSTOCK_KEY_FILE": str(file)}, "no key in it"),
        ({"PENSTOCK_KEY_FILE": str(latin)}, "not UTF-8"),
    ):
        with pytest.raises(KeysError, match=said) as refused:
            key_from_environment(environment)
        assert "schl" not in str(refused.value)


async def test_the_variable_may_end_with_a_newline_as_the_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KEY", "penstock.ci.secret\n")
    async with penstock.Client() as client:
        assert dict(client._queue.identity())["authorization"] == "Bearer penstock.ci.secret"


@pytest.mark.parametrize("text", ["secret\n", "sec\nret", "secr\u00e9t"])
async def test_what_no_call_can_carry_is_refused_when_the_client_is_made(text: str) -> None:
    with pytest.raises(KeysError, match="the API key: must be") as refused:
        penstock.Client(api_key=text)
    assert "sec" not in str(refused.value)
    with pytest.raises(KeysError, match="the tenant: must be"):
        penstock.Client(tenant=text)
