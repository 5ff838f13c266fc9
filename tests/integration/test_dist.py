"""The wheel alone: it installs into an empty environment and starts a service there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tools.make_dist import ROOT, make_dist

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin directory of an environment that has the wheel, and of this one only the packages it needs."""
    directory = tmp_path_factory.mktemp("dist")
    _, wheel = make_dist(directory / "dist")
    environment = directory / "venv"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    # Where PYTHONPATH names an installed Penstock, pip finds that and is done.
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*command, str(wheel)], check=True, env=elsewhere)
    # A path entry, unlike the directory itself, does not follow the link to this source tree that is in there.
    site = next((environment / "lib").glob("python3*/site-packages"))
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def test_the_installed_wheel_serves(installed: Path, tmp_path: Path) -> None:
    python = str(installed / "python")
    clean = {"PATH": str(installed)}
    where = subprocess.run(
        [python, "-c", "import services, penstock; print(services.__file__, penstock.__file__)"],
        cwd=tmp_path, env=clean, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert all(Path(path).is_relative_to(installed.parent) for path in where)
    queue = subprocess.Popen(
        [python, "-m", "services.queue", "--listen", "127.0.0.1:0", "--data-dir", "data"],
        cwd=tmp_path, env=clean, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert queue.stdout is not None
        address = queue.stdout.readline().rpartition(" ")[2].strip()
        health = [python, "-m", "services.health", address]
        assert subprocess.run(health, cwd=tmp_path, env=clean, check=False).returncode == 0
        queue.send_signal(signal.SIGTERM)
        assert queue.wait(60) == 0
        assert subprocess.run(health, cwd=tmp_path, env=clean, capture_output=True, check=False).returncode == 1
    finally:
        queue.kill()
        queue.wait()


def test_the_version_is_the_one_of_the_project(installed: Path, tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    said = subprocess.run(
        [installed / "penstock", "version"],
        cwd=tmp_path, env={"PATH": str(installed)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.strip() == version


def test_one_commit_makes_one_sdist_and_one_wheel(installed: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in (installed.parent.parent / "dist").iterdir()}
    again = {path.name: path.read_bytes() for path in make_dist(tmp_path / "dist")}
    assert again == before, "Docker would compile the services anew"


def test_the_wheel_holds_the_packages_and_nothing_else(installed: Path) -> None:
    (wheel,) = (installed.parent.parent / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        modules = {name for name in archive.namelist() if name.endswith(".py")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"penstock", "services"}
    assert modules == {str(p.relative_to(ROOT)) for top in ("penstock", "services") for p in (ROOT / top).rglob("*.py")}
