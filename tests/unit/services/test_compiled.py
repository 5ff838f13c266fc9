"""What is compiled is written in a form that mypyc compiles to the same meaning, and is what a compiled run loads."""

from __future__ import annotations

import ast
import importlib
import os
import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import show_version

ROOT = Path(__file__).resolve().parents[3]
SETUP: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
MODULES: list[str] = SETUP["modules"]()

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: str) -> list[Function]:
    """Return the functions of a source file."""
    tree = ast.parse((ROOT / path).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield what is in a function, without the functions in it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (Function, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def test_no_compiled_coroutine_waits_while_it_handles_an_exception() -> None:
    """Python puts aside what a coroutine handles while others run, and mypyc does not.

    Whatever is raised meanwhile, and afterwards if the coroutine never goes on, has that exception for its context:
    logs tell of two failures where there was one, and it stays in memory with all that its frames hold.
    """
    waiting = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncWith, ast.AsyncFor)
    waits = [
        f"{path}:{node.lineno}"
        for path in MODULES
        for handler in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(handler, ast.ExceptHandler)
        for node in ast.walk(handler)
        if isinstance(node, waiting)
    ]
    assert waits == []


def test_every_core_is_compiled_whole() -> None:
    """A module that is left out is called through the interpreter by all that are not; folders in a core count too."""
    tops = {path[: path.index("/core/")] + "/core" for path in MODULES if "/core/" in path}
    cores = {str(found.relative_to(ROOT)) for top in tops for found in (ROOT / top).rglob("*.py")}
    left_out = {path for path in cores - set(MODULES) if not path.endswith("__init__.py")}
    assert left_out == {"services/queue/core/open_class.py"}, "that one is a decorator's name"


@pytest.mark.skipif("PENSTOCK_COMPILED" not in os.environ, reason="`make test-compiled` asks for it")
@pytest.mark.parametrize("path", MODULES)
def test_the_compiled_module_is_what_is_loaded(path: str) -> None:
    loaded = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert str(loaded.__file__).endswith(".so")


def test_the_version_says_whether_the_services_are_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    show_version()
    assert ("(compiled)" in capsys.readouterr().out) == ("PENSTOCK_COMPILED" in os.environ)


@pytest.mark.parametrize("path", MODULES)
def test_no_compiled_function_is_an_async_generator(path: str) -> None:
    for function in functions(path):
        yields = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own_nodes(function))
        assert not (yields and isinstance(function, ast.AsyncFunctionDef)), function.name


@pytest.mark.parametrize("path", MODULES)
def test_each_except_clause_of_a_compiled_function_has_a_name_of_its_own(path: str) -> None:
    # The compiled variable has the type of the first clause: another exception there is a TypeError.
    for function in functions(path):
        bound = Counter(node.name for node in own_nodes(function) if isinstance(node, ast.ExceptHandler) and node.name)
        assert all(count == 1 for count in bound.values()), f"{function.name}: {bound}"


FEW = {
    "services/queue/core/entry.py": {"Counters", "Recovered"},
    "services/queue/core/quotas.py": {"Held"},
    "services/queue/core/workers.py": {"Worker"},
    "services/queue/speaker.py": {"Link", "Greeting"},
    "services/queue/watch/hub.py": {"_Position", "_Pending"},
    "services/scheduler/core/counters.py": {"Counters"},
    "services/scheduler/core/fleet.py": {"Group", "Worker"},
    "services/scheduler/core/sharing/lately.py": {"Lately"},
    "services/scheduler/core/admission/predictive.py": {"View"},
    "services/scheduler/core/sharing/savings.py": {"Saving"},
    "services/worker/core/entry.py": {"Counters"},
}
"""Data classes in compiled modules: none is made for every request, only for workers, channels and watchers, or for
heads that fit nowhere."""


@pytest.mark.parametrize("path", MODULES)
def test_what_every_request_needs_is_no_data_class(path: str) -> None:
    # The compiler leaves the methods of a data class to the interpreter: making one takes several times as long.
    classes = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.ClassDef)]
    found = {made.name for made in classes if any("dataclass" in ast.unparse(one) for one in made.decorator_list)}
    assert found <= FEW.get(path, set())


def test_sources_are_compiled_for_wheels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_COMPILE", raising=False)
    assert SETUP["extensions"]() == []
    monkeypatch.setenv("PENSTOCK_COMPILE", "1")
    monkeypatch.setattr("sys.argv", ["setup.py", "editable_wheel"])
    with pytest.raises(SystemExit, match="would hide them"):
        SETUP["extensions"]()
    assert not [path for top in ("penstock", "services") for path in (ROOT / top).rglob("*.so")]
