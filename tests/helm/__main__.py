"""The Helm chart, linted, rendered and checked: `python -m tests.helm`.

Renders the chart with the values of every file of `cases/`, holds the objects against Kubernetes' schemas (unknown
fields refused), KEDA's and the Prometheus operator's types, and against each other (`checks`). Values that must be
refused are refused. An upgrade finds a cluster (`cluster`) and keeps the workers there. What is planted is found: the
checkers are checked first. The last line printed is JSON.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.helm import toolbox
from tests.helm.checks import Object, component_of, container_of, is_outside, lacks_models, of_kind, problems, title
from tests.helm.cluster import cluster
from tests.helm.toolbox import NAMESPACE, Toolbox
from tests.support.fleet import ROOT

CHART = ROOT / "deploy" / "helm" / "penstock"
CASES = sorted(Path(__file__).with_name("cases").glob("*.yaml"))
DEFAULTS = Path(__file__).with_name("cases") / "defaults.yaml"
KUBERNETES = ("1.27", "1.33", "1.37")
"""The oldest that Chart.yaml allows, the one of the kubectl beside this Helm, and the newest with schemas."""

UPGRADE = ("--is-upgrade", "--dry-run=server", "--disable-openapi-validation", "--kube-apiserver")
"""An upgrade that asks the cluster and changes nothing; the address comes last."""

REFUSED: dict[str, dict[str, Any]] = {
    "insecure": {"tls": {"enabled": False}},
    "contradict": {"insecure": True},
    "keys/serviceKey": {"tls": {"enabled": False}, "insecure": True, "keys": {"secretName": "keys"}},
    "keys/secretName": {"keys": {"serviceKey": {"secretName": "key"}}},
    "/keys/file": {"keys": {"secretName": "keys", "file": "../keys.toml"}},
    "nonsense": {"nonsense": 1},
    "gpu": {"workers": [{"name": "a", "model": "m", "gpu": 2}]},
    "/workers/0": {"workers": [{"name": "a"}]},
    "pool a names no model": {"workers": [{"name": "a", "model": ""}]},
    "/workers/0/name": {"workers": [{"name": "A_b", "model": "m"}]},
    "/workerDefaults/drainSeconds": {"workerDefaults": {"drainSeconds": 0}},
    "/gateway/service/type": {"gateway": {"service": {"type": "Ingress"}}},
    "longer than 46 characters": {
        "fullnameOverride": "inference-production",
        "workers": [{"name": "llama-70b-instruct-1", "model": "m", "autoscaling": {"enabled": True}}],
    },
    "/channels": {"channels": []},
    "default_channel": {"channels": [{"name": "chat"}]},
    "/channels/0/ceiling_share": {"channels": [{"name": "a", "ceiling_share": 0}]},
    "/channels/0/guaranteed_share": {"channels": [{"name": "a", "guaranteed_share": 2}]},
}
"""What the error must name, and the values that are no good."""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def render(tools: Toolbox, values: Path) -> list[Object]:
    """Return the objects; raises AssertionError with Helm's words."""
    result = tools.template(CHART, [values])
    assert result.returncode == 0, f"{values.name}: {result.stderr}"
    return [found for found in yaml.safe_load_all(result.stdout) if found]


def check_objects(tools: Toolbox, objects: list[Object], directory: Path, versions: tuple[str, ...]) -> list[str]:
    """Return what schemas, types and the objects among each other find wrong."""
    manifest = directory / "objects.yaml"
    manifest.write_text(yaml.safe_dump_all([found for found in objects if not is_outside(found)]))
    wrong: list[str] = []
    for version in versions:
        result = tools.against_schemas(manifest, version)
        if result.returncode:
            wrong.append(f"Kubernetes {version}: {result.stdout}{result.stderr}")
    outside = tools.against_types(json.dumps([found for found in objects if is_outside(found)]))
    if outside.returncode:
        wrong.append(outside.stdout + outside.stderr)
    return wrong + list(problems(objects))


def plant(objects: list[Object]) -> dict[str, list[Object]]:
    """Return copies of the objects, each with one thing wrong, by what must be said of it."""
    planted: dict[str, list[Object]] = {}

    def copy_for(said: str) -> list[Object]:
        return planted.setdefault(said, copy.deepcopy(objects))

    of_kind(copy_for("replcas"), "StatefulSet")[0]["spec"]["replcas"] = 1
    of_kind(copy_for("selects nothing"), "Service")[0]["spec"]["selector"]["app.kubernetes.io/component"] = "quue"
    of_kind(copy_for("is killed after"), "Deployment")[-1]["spec"]["template"]["spec"][
        "terminationGracePeriodSeconds"
    ] = 30
    del of_kind(copy_for("may not reach"), "NetworkPolicy")[1]["spec"]["ingress"][0]["from"][0]
    name = {"name": "PENSTOCK_WORKER_NONE", "value": "1"}
    for workload in of_kind(copy_for("PENSTOCK_WORKER_NONE"), "Deployment"):
        workload["spec"]["template"]["spec"]["containers"][0]["env"].append(name)
    for workload in of_kind(copy_for("while the queue is away"), "Deployment"):
        container = workload["spec"]["template"]["spec"]["containers"][0]
        container["livenessProbe"] = container["readinessProbe"]
    for workload in of_kind(copy_for("livenessProbe kills it while its disk"), "StatefulSet"):
        container = workload["spec"]["template"]["spec"]["containers"][0]
        container["livenessProbe"] = container["readinessProbe"]
    for workload in of_kind(copy_for("is sent changes while its disk"), "StatefulSet"):
        container = workload["spec"]["template"]["spec"]["containers"][0]
        container["readinessProbe"] = container["livenessProbe"]
    plant_secrets(copy_for)
    for workload in of_kind(copy_for("volume models has the sources"), "Deployment")[-1:]:
        for volume in workload["spec"]["template"]["spec"]["volumes"]:
            if volume["name"] == "models":
                volume["hostPath"] = {"path": "/srv/models"}
    of_kind(copy_for("minReplicaCount"), "ScaledObject")[0]["spec"]["minReplicaCount"] = "two"
    of_kind(copy_for("scales nothing"), "ScaledObject")[0]["spec"]["scaleTargetRef"]["name"] = "other"
    for said, pod in (("or of another fleet", ""), ("other pods than the scheduler's", ', pod=~"[a-z0-9-]+"')):
        starvation = of_kind(copy_for(said), "ScaledObject")[0]["spec"]["triggers"][0]["metadata"]
        starvation["query"] = re.sub(r', pod=~"[^"]*"', pod, starvation["query"])
    of_kind(copy_for("endpoints"), "ServiceMonitor")[0]["spec"]["endpoints"] = [{"port": 7510, "relabelings": []}]
    return planted


def plant_secrets(copy_for: Callable[[str], list[Object]]) -> None:
    """Plant what would open the fleet or shut it."""

    def environment(said: str, component: str) -> list[Any]:
        (found,) = [w for w in of_kind(copy_for(said), "Deployment", "StatefulSet") if component_of(w) == component]
        env: list[Any] = found["spec"]["template"]["spec"]["containers"][0]["env"]
        return env

    environment("one of both", "gateway").append({"name": "PENSTOCK_INSECURE", "value": "true"})
    scheduler = environment("scheduler asks for no keys", "scheduler")
    scheduler[:] = [item for item in scheduler if item["name"] != "PENSTOCK_KEYS"]
    for item in environment("a key in plain sight", "scheduler"):
        if item["name"] == "PENSTOCK_KEY":
            item["value"] = "penstock.fleet.secret"
            del item["valueFrom"]
    gateway = environment("gateway has no key of a service", "gateway")
    gateway[:] = [item for item in gateway if item["name"] != "PENSTOCK_KEY"]
    environment("gateway has the keys file", "gateway").append({"name": "PENSTOCK_KEYS", "value": "/tmp/keys.toml"})
    for workload in of_kind(copy_for("may be read by everybody"), "StatefulSet"):
        for volume in workload["spec"]["template"]["spec"]["volumes"]:
            volume.get("secret", {}).pop("defaultMode", None)


def check_checkers(tools: Toolbox, objects: list[Object], directory: Path) -> int:
    """Return how many planted faults were found; raises AssertionError for one that was not."""
    planted = plant(objects)
    for said, wrong in planted.items():
        found = "\n".join(check_objects(tools, wrong, directory, KUBERNETES[-1:]))
        assert said in found, f"the fault {said!r} was planted, and this was found: {found}"
    return len(planted)


def check_refusals(tools: Toolbox, directory: Path) -> int:
    """Return how many wrong values were refused; raises AssertionError for those that were not.

    The chart's own are refused as well: only who installs it knows a model.
    """
    assert "pool default names no model" in tools.template(CHART, []).stderr
    for said, values in REFUSED.items():
        path = directory / "refused.yaml"
        path.write_text(yaml.safe_dump(values))
        result = tools.template(CHART, [DEFAULTS, path])
        told = result.stderr.replace("'", "").replace(".", "/")
        assert result.returncode, f"taken, and should not be: {values}"
        assert said in told, f"{values}: {result.stderr}"
    return len(REFUSED)


def check_replicas(tools: Toolbox, values: Path, objects: list[Object]) -> int:
    """Return how many scaled pools keep the workers they have: those that an upgrade finds, whatever the values say.

    Without a cluster to ask, no number is in the manifest.
    """
    scaled = {found["spec"]["scaleTargetRef"]["name"] for found in of_kind(objects, "ScaledObject")}
    pools = [workload for workload in of_kind(objects, "Deployment") if workload["metadata"]["name"] in scaled]
    assert not [pool for pool in pools if "replicas" in pool["spec"]], "a number that the autoscaler would have to undo"
    there = copy.deepcopy(pools)
    for number, pool in enumerate(there):
        pool["spec"]["replicas"] = 3 * number
    with cluster(NAMESPACE, objects, there) as address:
        result = tools.template(CHART, [values], *UPGRADE, address)
    assert result.returncode == 0, result.stderr
    rendered = of_kind([found for found in yaml.safe_load_all(result.stdout) if found], "Deployment")
    numbers = {found["metadata"]["name"]: found["spec"].get("replicas") for found in rendered}
    for pool in there:
        has, gets = pool["spec"]["replicas"], numbers[pool["metadata"]["name"]]
        assert has == gets, f"{title(pool)} has {has} replicas, and an upgrade gives it {gets}"
    return len(there)


def main() -> None:
    """Check everything."""
    tools = toolbox.default()
    say(f"helm {tools.version}")
    total = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for values in CASES:
            tools.lint(CHART, values)
            objects = render(tools, values)
            wrong = check_objects(tools, objects, directory, KUBERNETES)
            assert not wrong, f"{values.name}:\n" + "\n".join(wrong)
            has_key = "serviceKey" in values.read_text()
            notes = tools.notes(CHART, values)
            assert ("PENSTOCK_KEY" in notes) == has_key, "the notes' command gives no key"
            workers = [w for w in of_kind(objects, "Deployment") if component_of(w) == "worker"]
            assert notes.count("nothing at /models") == sum(map(lacks_models, workers)), "an empty volume, and no word"
            images = sorted({container_of(w)["image"] for w in of_kind(objects, "Deployment", "StatefulSet")})
            say(f"{values.name}: {len(objects)} objects, images {', '.join(images)}")
            total += len(objects)
        everything = render(tools, CASES[-1])
        found = {"faults_found": check_checkers(tools, everything, directory)}
        found["replicas_kept"] = check_replicas(tools, CASES[-1], everything)
        found["values_refused"] = check_refusals(tools, directory)
    print(json.dumps({"cases": len(CASES), "objects": total, "kubernetes": list(KUBERNETES), **found}))


if __name__ == "__main__":
    main()
