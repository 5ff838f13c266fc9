"""What every file of the repository keeps to."""

from __future__ import annotations

import re
import subprocess
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 450
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


def tracked() -> list[Path]:
    """Return the files git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [ROOT / line for line in listing.stdout.splitlines()]
    return [path for path in found if path.is_file()] or [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts]


def name(path: Path) -> str:
    """Return the path as shown in a test's name."""
    return str(path.relative_to(ROOT))


TEXT = [p for p in tracked() if p.suffix in {".py", ".md", ".proto", ".toml", ".txt", ".sh", ".yaml", ""}]
PYTHON = [p for p in TEXT if p.suffix == ".py" and not GENERATED.search(p.name)]
DOCUMENTS = [p for p in TEXT if p.suffix == ".md"]


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_a_file_holds_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_no_machine_path_or_download_host_is_recorded() -> None:
    host = re.compile(r"https?://[\w.-]*(pypi|pythonhosted|registry|debian|download\.)[\w.-]*", re.IGNORECASE)
    home = re.compile(r"(?<![\w.])/(root|home/\w+|work/(main|shared))/")
    for path in TEXT:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            assert not host.search(line), f"{name(path)}:{number}"
            assert not home.search(line), f"{name(path)}:{number}"


def test_nothing_is_left_open() -> None:
    marker = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|NotImplemented" r"Error)\b")
    for path in PYTHON:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not marker.search(line), f"{name(path)}:{number}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_in_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (path.parent / target).exists(), f"{name(path)}: {target}"


def test_every_make_target_named_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        for target in re.findall(r"`make ([a-z][a-z-]*)", path.read_text()):
            assert target in targets, f"{name(path)} names `make {target}`"


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[", text, re.MULTILINE), "no version section"
    for heading in re.findall(r"^### (.+)$", text, re.MULTILINE):
        assert heading in {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_every_direct_dependency_is_justified() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    reasons = (ROOT / "CONTRIBUTING.md").read_text()
    for requirement in listed:
        package = re.split(r"[<>=\[;~! ]", requirement)[0]
        assert f"`{package}`" in reasons, f"CONTRIBUTING.md gives no reason for {package}"


@pytest.mark.parametrize("parent", ["services", "tests"])
def test_the_map_of_the_house_names_every_folder(parent: str) -> None:
    drawn = (ROOT / "ARCHITECTURE.md").read_text().partition("## The house")[2].split("```")[1]
    folders = {path.relative_to(ROOT / parent).parts[0] for path in PYTHON if (ROOT / parent) in path.parents}
    missing = {name for name in folders if not name.endswith(".py") and not re.search(rf"\b{name}\b", drawn)}
    assert not missing
