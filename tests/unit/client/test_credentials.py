"""The key of a command or a client comes from the environment as a service's does."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    file = tmp_path / "key"
    file.write_text("schlüssel", encoding="latin-1")
    for environment, said in (
        ({"PENSTOCK_KEY": "k", "PENSTOCK_KEY_FILE": str(file)}, "only one of them"),
        ({"PENSTOCK_KEY_FILE": str(tmp_path / "none")}, "No such file"),
        ({"PENSTOCK_KEY_FILE": str(file)}, "no key in it"),
    ):
        with pytest.raises(KeysError, match=said) as refused:
            key_from_environment(environment)
        assert "schl" not in str(refused.value)
