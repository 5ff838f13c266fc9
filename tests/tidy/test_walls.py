"""The walls between the modules: who may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from penstock import errors, keys
from services.queue.core import entry, quotas

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("services/**/*.py"), *ROOT.glob("penstock/**/*.py")])
CORES = sorted([*ROOT.glob("services/*/core/**/*.py"), *ROOT.glob("services/core/*.py")])
SHARED_CORE = "services.core"
"""What the cores of all services may import."""

FOR_THE_COMPILER = {"mypy_extensions"}
"""Imported only while types are checked or modules compiled."""

IMPURE = {"time", "random", "asyncio", "threading", "socket", "os", "io", "pathlib", "subprocess", "datetime",
          "secrets", "uuid", "logging", "tempfile", "signal"}  # fmt: skip
"""Standard modules through which a clock, chance or the outside world could enter a core."""


ABOVE_SERVICES = "services/config_check.py"
"""Compares the settings of all services, and is run by none of them."""


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names a file imports, relative ones resolved."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def name(path: Path) -> str:
    """Return the path as shown in a test's name."""
    return str(path.relative_to(ROOT))


def test_there_are_cores_to_check() -> None:
    assert {path.relative_to(ROOT).parts[1] for path in CORES} >= {"queue", "scheduler", "worker"}


@pytest.mark.parametrize("path", CORES, ids=name)
def test_a_core_knows_only_the_standard_library_its_own_core_and_what_cores_share(path: Path) -> None:
    parts = path.relative_to(ROOT).parent.parts
    own = ".".join(parts[: parts.index("core") + 1])
    for module in imports(path):
        top = module.split(".")[0]
        assert top not in IMPURE, f"{name(path)} imports {module}"
        allowed = top in sys.stdlib_module_names or top in FOR_THE_COMPILER
        pure = any(module == core or module.startswith(core + ".") for core in (own, SHARED_CORE))
        assert allowed or pure, f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_vllm_is_imported_in_its_folder_alone_and_torch_in_one_module(path: Path) -> None:
    heavy = {module.split(".")[0] for module in imports(path)} & {"vllm", "torch"}
    if name(path).startswith("services/worker/vllm/"):
        heavy.discard("vllm")
    if name(path) == "services/worker/vllm/engine.py":
        heavy.discard("torch")
    assert not heavy, f"{name(path)} imports {heavy}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("penstock/*.py")), ids=name)
def test_the_client_takes_grpc_from_where_its_variables_are_set(path: Path) -> None:
    assert path.name in {"loaded.py", "grpc_variables.py"} or "grpc" not in set(imports(path))


def test_the_gateway_loads_neither_vllm_nor_torch() -> None:
    program = "import sys, services.gateway.service; print({'vllm', 'torch', 'openai', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_no_service_loads_what_exports_spans_or_describes_it_before_it_is_asked_to() -> None:
    mains = ", ".join(f"services.{service}.__main__" for service in ("queue", "scheduler", "worker", "gateway"))
    rare = ("opentelemetry.sdk", "opentelemetry.exporter", "grpc_reflection.v1alpha")
    program = f"import sys, {mains}; print([module for module in sys.modules if module.startswith({rare})])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("path", [p for p in SOURCES if name(p).startswith("penstock/")], ids=name)
def test_the_public_package_does_not_import_the_services(path: Path) -> None:
    assert not {module for module in imports(path) if module.split(".")[0] == "services"}


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if name(p).startswith("services/") and name(p) != ABOVE_SERVICES], ids=name
)
def test_a_service_does_not_import_another_service(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    others = {"queue", "scheduler", "worker", "gateway"} - {parts[1]}
    for module in imports(path):
        pieces = module.split(".")
        assert not (pieces[0] == "services" and len(pieces) > 1 and pieces[1] in others), f"{name(path)}: {module}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
    }
    graph = {module: {*imports(path)} & modules.keys() - {module} for module, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them; also where types alone are imported


def test_what_the_queue_s_core_says_for_itself_is_what_the_client_hears() -> None:
    assert quotas.OVER_QUOTA == errors.OVER_QUOTA
    assert quotas.LARGER_THAN_QUOTA == errors.LARGER_THAN_QUOTA
    assert entry.DEFAULT_TENANT == keys.DEFAULT_TENANT
