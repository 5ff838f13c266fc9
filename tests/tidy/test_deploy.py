"""What the images and the composed stack are made of fits the rest of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from services.config import SHUTDOWN_GRACE_S, ServiceSettings
from services.config_source import variable_of
from services.gateway.settings import GatewaySettings
from services.queue.settings import QueueSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.service import END_S
from services.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PACKAGES = sorted((DEPLOY / "docker" / "packages").glob("*.txt"))
CONSTRAINED = [path for path in PACKAGES if "\n-c " in path.read_text()]
STACK: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
OURS = ("queue", "scheduler", "worker", "gateway")
PUBLISHED = {"queue", "gateway"}
DOCKER_STOP_S = 10.0
"""Between SIGTERM and SIGKILL, of a container for which nobody has set it."""


def names(path: Path) -> set[str]:
    """Return the packages a requirements file names."""
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)", path.read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-") for name in found}


def variables() -> set[str]:
    """Return the environment variables that the services read."""
    found = {"PENSTOCK_QUEUE", "PENSTOCK_SCHEDULER"}  # of commands
    for kind in (QueueSettings, SchedulerSettings, WorkerSettings, GatewaySettings):
        found |= {variable_of(kind, name) for name in kind.model_fields}
    return found


@pytest.mark.parametrize("path", CONSTRAINED, ids=lambda path: path.stem)
def test_every_package_of_an_image_is_pinned(path: Path) -> None:
    assert names(path) <= names(ROOT / "requirements" / "base.txt")


@pytest.mark.parametrize("path", [p for p in PACKAGES if p not in CONSTRAINED], ids=lambda path: path.stem)
def test_what_has_no_constraint_has_its_version(path: Path) -> None:
    for line in path.read_text().splitlines():
        assert line.startswith("#") or "==" in line, line


def test_images_are_compiled_by_what_the_tests_are_compiled_by() -> None:
    pinned = {line for path in (ROOT / "requirements").glob("*.txt") for line in path.read_text().splitlines()}
    lines = [
        line for line in (DEPLOY / "docker" / "packages" / "compile.txt").read_text().splitlines() if line[0] != "#"
    ]
    assert lines
    assert set(lines) <= pinned


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.worker"])
def test_an_image_sets_variables_that_exist(name: str) -> None:
    text = (DEPLOY / "docker" / name).read_text()
    assert set(re.findall(r"\b(PENSTOCK_\w+)=", text)) <= variables()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.worker"])
def test_a_build_sees_the_scripts_that_it_runs(name: str) -> None:
    seen = (ROOT / ".dockerignore").read_text().splitlines()
    scripts = set(re.findall(r"deploy/docker/\w+\.sh", (DEPLOY / "docker" / name).read_text()))
    assert scripts
    for script in scripts:
        assert (ROOT / script).is_file()
        assert f"!{script}" in seen


@pytest.mark.parametrize("service", OURS)
def test_the_stack_sets_variables_that_exist(service: str) -> None:
    assert {key for key in STACK[service]["environment"] if key.startswith("PENSTOCK")} <= variables()


@pytest.mark.parametrize("service", OURS)
def test_a_service_of_the_stack_can_write_only_where_it_must(service: str) -> None:
    assert STACK[service]["read_only"]
    assert STACK[service]["cap_drop"] == ["ALL"]


def test_the_worker_can_load_what_it_compiles() -> None:
    (where,) = STACK["worker"]["tmpfs"]
    assert where == "/tmp:exec", "Docker mounts it noexec unless told otherwise"


def test_the_stack_publishes_queue_and_gateway_on_loopback_and_nothing_else() -> None:
    for service in OURS:
        ports = STACK[service].get("ports", [])
        assert bool(ports) == (service in PUBLISHED)
        assert all(port.startswith("127.0.0.1:") for port in ports)


def test_a_stopped_service_gets_the_time_it_takes() -> None:
    for service in OURS:
        told = re.search(
            r":-(\d+)", STACK[service]["environment"].get(f"PENSTOCK_{service.upper()}_SHUTDOWN_GRACE_S", "")
        )
        grace_s = float(told[1]) if told else SHUTDOWN_GRACE_S
        assert float(STACK[service]["stop_grace_period"].rstrip("s")) >= grace_s + END_S


@pytest.mark.parametrize("settings", [QueueSettings, SchedulerSettings, WorkerSettings, GatewaySettings])
def test_a_service_that_docker_stops_by_itself_ends_in_time(settings: type[ServiceSettings]) -> None:
    assert settings.model_fields["shutdown_grace_s"].default + END_S <= DOCKER_STOP_S


def test_prometheus_scrapes_every_service_of_the_stack() -> None:
    jobs = yaml.safe_load((DEPLOY / "observability" / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {target for job in jobs for config in job.get("static_configs", []) for target in config["targets"]}
    found = {f"{name}:{dns['port']}" for job in jobs for dns in job.get("dns_sd_configs", []) for name in dns["names"]}
    assert {f"{service}:7510" for service in OURS} <= targets | found
    hosts = {target.partition(":")[0] for target in targets | found}
    assert hosts <= set(STACK)
    # Of these there may be several, behind one name.
    assert found == {"worker:7510"}
    assert not found & targets


def test_the_files_that_the_stack_mounts_exist() -> None:
    for service, what in STACK.items():
        for volume in what.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), f"{service}: {source}"


TLS: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())["services"]


@pytest.mark.parametrize("service", OURS)
def test_every_service_has_certificates_with_tls(service: str) -> None:
    environment, targets = TLS[service]["environment"], {mounted["target"] for mounted in TLS[service]["volumes"]}
    assert environment.keys() <= variables()
    assert environment["PENSTOCK_INSECURE"] == "false"
    for name in ("PENSTOCK_TLS_CA", "PENSTOCK_TLS_CERT", "PENSTOCK_TLS_KEY"):
        assert str(Path(environment[name]).parent) in targets
    assert ("PENSTOCK_KEYS" in environment) == (service in {"queue", "scheduler"})
    assert all(mounted["read_only"] for mounted in TLS[service]["volumes"])


def test_with_tls_prometheus_asks_the_same_with_a_certificate() -> None:
    plain, secure = (
        yaml.safe_load((DEPLOY / "observability" / f"prometheus{kind}.yaml").read_text()) for kind in ("", ".tls")
    )
    told = TLS["queue"]["environment"]
    certificate = sorted(told[f"PENSTOCK_TLS_{name}"] for name in ("CA", "CERT", "KEY"))
    for job in secure["scrape_configs"][:2]:
        assert job.pop("scheme") == "https"
        tls = job.pop("tls_config")
        # Who is found by DNS is scraped by address, which no certificate names.
        names = [name for dns in job.get("dns_sd_configs", []) for name in dns["names"]]
        assert [tls.pop(name) for name in ("server_name",) if name in tls] == names
        assert sorted(tls.values()) == certificate
    assert secure == plain
