"""An editable install gives the package also to a script that lies beside the clone, a directory called `penstock`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]), end='')"

SCRIPT = """
import site, sys
site.addsitedir(sys.argv[1])
import penstock, services
from penstock.queue.v1 import queue_pb2
print(penstock.Client.__module__, penstock.__file__, services.__file__)
"""


def test_a_script_beside_the_clone_has_the_package(tmp_path: Path) -> None:
    clone, site = tmp_path / "penstock", tmp_path / "site"
    clone.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    for name in ("penstock", "services"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    built = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(site)
    (tmp_path / "script.py").write_text(SCRIPT)
    # The packages it needs are those of this environment, whose own Penstock must not be found.
    needed = [path for path in sys.path if path.endswith("-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "script.py", str(site)],
        cwd=tmp_path, env={"PYTHONPATH": ":".join(needed)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wanted = ["penstock.client", str(clone / "penstock/__init__.py"), str(clone / "services/__init__.py")]
    assert done.stdout.split() == wanted, done.stderr
