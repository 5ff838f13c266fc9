"""Debian's Prometheus with the rules of deploy/observability, over services on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.support.ports import free_port
from tests.support.promql import OBSERVABILITY
from tests.support.waiting import wait_for

SCRAPE_INTERVAL = "1s"
"""Instead of five: so that rates have their samples soon."""


def promtool(*arguments: str) -> str:
    """Run promtool; return what it prints, or raise AssertionError with it."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """One server with its data below `directory`; use as a context manager."""

    def __init__(self, directory: Path, targets: Mapping[str, str]) -> None:
        """Scrape `targets`: addresses by the service they have in prometheus.yaml."""
        self._directory = directory
        directory.mkdir(parents=True)
        configuration = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text())
        configuration["global"]["scrape_interval"] = SCRAPE_INTERVAL
        jobs = {job["job_name"]: job for job in configuration["scrape_configs"]}
        for known in jobs["penstock"]["static_configs"]:
            known["targets"] = [a for name, a in targets.items() if name == known["labels"]["service"]]
        # The composed stack's DNS knows the workers; here are several on one machine.
        del jobs["workers"]["dns_sd_configs"]
        workers = [address for name, address in targets.items() if name.startswith("worker-")]
        jobs["workers"]["static_configs"] = [{"targets": workers}]
        configuration["scrape_configs"] = [jobs["penstock"], jobs["workers"]]
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        shutil.copy(OBSERVABILITY / "alerts.yaml", directory)
        promtool("check", "config", str(directory / "prometheus.yaml"))
        self.address = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> Prometheus:
        flags = {
            "config.file": self._directory / "prometheus.yaml",
            "storage.tsdb.path": self._directory / "data",
            "web.listen-address": self.address,
        }
        with (self._directory / "log").open("wb") as log:
            command = ["prometheus", *(f"--{name}={value}" for name, value in flags.items())]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self._ready, "Prometheus to be ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _ready(self) -> bool:
        assert self._process.poll() is None, (self._directory / "log").read_text()
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str, **fields: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{fields}: {json.load(error)['error']}") from None

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return the series that a query has now; raises AssertionError if Prometheus refuses it."""
        found = self._get("query", query=query)
        assert found["resultType"] == "vector", query
        return list(found["result"])

    def broken_rules(self) -> list[str]:
        """Return the alerts whose evaluation went wrong."""
        groups = self._get("rules")["groups"]
        return [f"{rule['name']}: {rule['lastError']}" for g in groups for rule in g["rules"] if rule.get("lastError")]
