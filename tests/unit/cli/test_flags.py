"""What commands say of flags that do nothing, and what is pasted of what they print."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.errors import CommandError
from penstock.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("submit", "hi", "--stream", "--json"), "for JSON use --wait"),
        (("run-batch", "-i", "in", "-o", "out", "--workers", "2"), "--workers needs --up"),
        (("run-batch", "-i", "in", "-o", "out", "--data-dir", "d"), "--data-dir needs --up"),
    ],
)
def test_a_flag_without_effect_is_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_what_certs_prints_can_be_pasted(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["certs", str(tmp_path / "my certs")])
    services, _, clients = ran.stdout.partition("# for their clients:\n")
    for text, name in ((services, "service"), (clients, "client")):
        shell = [
            "env",
            "-i",
            "sh",
            "-c",
            f'{text}\nprintf "%s\\n" "$PENSTOCK_TLS_CA" "$PENSTOCK_TLS_CERT" "$PENSTOCK_TLS_KEY"',
        ]
        told = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()
        assert [Path(path).name for path in told] == ["ca.pem", f"{name}.pem", f"{name}-key.pem"]
        assert all(Path(path).is_file() for path in told)
