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


@pytest.mark.parametrize("host", ["bad host", "", "https://here", "here:7410", "é.example"])
def test_a_certificate_is_made_for_no_host_that_there_cannot_be(host: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"--host: .* is no host name or IP address") as refused:
        CliRunner().invoke(app, ["certs", str(tmp_path / "certs"), "--host", host], catch_exceptions=False)
    assert (refused.value.status, list(tmp_path.iterdir())) == (2, [])


def test_a_certificate_is_made_for_names_and_addresses(tmp_path: Path) -> None:
    hosts = [
        word
        for host in ("queue-0.penstock.svc", "*.example.org", "my_host", "::1", "10.0.0.5")
        for word in ("--host", host)
    ]
    assert CliRunner().invoke(app, ["certs", str(tmp_path / "certs"), *hosts]).exit_code == 0
