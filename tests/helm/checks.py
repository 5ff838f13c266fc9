"""What the rendered objects must be beside well-formed: that they fit each other and the services."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]

from services.config import ChannelSettings
from tests.support.promql import OBSERVABILITY, OF_THE_TARGET, documented, selectors
from tests.tidy.test_deploy import variables

Object = dict[str, Any]

WORKLOADS = frozenset({"Deployment", "StatefulSet"})
OUTSIDE = frozenset({"keda.sh", "monitoring.coreos.com"})
"""API groups that Kubernetes itself does not have."""

SHARED_VARIABLES = frozenset(
    {"PENSTOCK_TLS_CERT", "PENSTOCK_TLS_KEY", "PENSTOCK_TLS_CA", "PENSTOCK_TLS_CLIENT_AUTH", "PENSTOCK_CONFIG"}
)
KEYED = frozenset({"queue", "scheduler"})
"""Who asks for keys."""

POD_PREFIX = 58
"""So many characters of a pod's name come from its ReplicaSet's name and the dash after it."""

END_S = 10
"""What a process needs beyond its own grace period, at least."""


def is_outside(found: Object) -> bool:
    """Whether the object's kind comes from a custom resource definition."""
    return str(found["apiVersion"]).split("/")[0] in OUTSIDE


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    """Return the objects of these kinds."""
    return [found for found in objects if found["kind"] in kinds]


def title(found: Object) -> str:
    """Return kind and name."""
    return f"{found['kind']} {found['metadata']['name']}"


def pod_of(workload: Object) -> Object:
    """Return the pod template."""
    template: Object = workload["spec"]["template"]
    return template


def container_of(workload: Object) -> Object:
    """Return the one container."""
    (container,) = pod_of(workload)["spec"]["containers"]
    return dict(container)


def covers(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether a selector chooses what has these labels."""
    return selector.items() <= labels.items()


def problems(objects: list[Object]) -> Iterator[str]:
    """Yield what does not fit."""
    names = [title(found) for found in objects]
    yield from (f"{name} is there twice" for name in set(names) if names.count(name) > 1)
    workloads = of_kind(objects, *WORKLOADS)
    for workload in workloads:
        for problem in (*_secure(workload), *_mounts(workload, objects), *_settings(workload), *_ends(workload)):
            yield f"{title(workload)}: {problem}"
    yield from _selectors(objects, workloads)
    yield from _services(objects, workloads)
    yield from _policies(objects, workloads)
    yield from _keys(workloads)
    yield from _channels(objects)
    yield from _monitoring(objects)
    yield from _scaling(objects, workloads)


def _secure(workload: Object) -> Iterator[str]:
    pod, container = pod_of(workload)["spec"], container_of(workload)
    if not (pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001):
        yield "does not run as the images' user"
    security = container["securityContext"]
    if not security["readOnlyRootFilesystem"] or security["allowPrivilegeEscalation"]:
        yield "may write its root or gain rights"
    if security["capabilities"] != {"drop": ["ALL"]} or pod["automountServiceAccountToken"]:
        yield "has capabilities or a token"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if len({"exec", "grpc", "httpGet"} & container[probe].keys()) != 1:
            yield f"{probe} asks nothing"
    for probe in ("startupProbe", "livenessProbe"):
        if "/health" in str(container[probe]):
            yield f"{probe} kills it while the queue is away"
        if component_of(workload) == "queue" and not _asks_whether_it_lives(container[probe]):
            yield f"{probe} kills it while its disk does not answer"
    if component_of(workload) == "queue" and _asks_whether_it_lives(container["readinessProbe"]):
        yield "is sent changes while its disk does not answer"


def _asks_whether_it_lives(probe: Object) -> bool:
    if "grpc" in probe:
        return not probe["grpc"].get("service")
    return "--live" in probe["exec"]["command"]


def _mounts(workload: Object, objects: list[Object]) -> Iterator[str]:
    pod, container = pod_of(workload)["spec"], container_of(workload)
    claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
    volumes = [volume["name"] for volume in pod["volumes"]] + claims
    mounted = [mount["name"] for mount in container["volumeMounts"]]
    if sorted(volumes) != sorted(mounted):
        yield f"volumes {sorted(volumes)} are mounted as {sorted(mounted)}"
    maps = {found["metadata"]["name"] for found in of_kind(objects, "ConfigMap")}
    named = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
    if not named <= maps:
        yield f"no ConfigMap {named - maps}"
    for volume in pod["volumes"]:
        sources = sorted(volume.keys() - {"name"})
        if len(sources) != 1:
            yield f"volume {volume['name']} has the sources {sources}"
    environment = {item["name"]: item.get("value", "") for item in container["env"]}
    paths = [mount["mountPath"] for mount in container["volumeMounts"]]
    for name, value in environment.items():
        if value.startswith("/") and not any(value.startswith(f"{path}/") for path in paths):
            yield f"{name}={value} is not in a volume"


def _settings(workload: Object) -> Iterator[str]:
    names = [item["name"] for item in container_of(workload)["env"]]
    if len(names) != len(set(names)):
        yield f"a variable is set twice: {sorted(names)}"
    unknown = {name for name in names if name.startswith("PENSTOCK")} - variables() - SHARED_VARIABLES
    if unknown:
        yield f"no service has {unknown}"
    plain, secret = "PENSTOCK_INSECURE" in names, "PENSTOCK_TLS_CERT" in names
    if plain == secret:
        yield "TLS or plain text, one of both"


def component_of(workload: Object) -> str:
    """Return which service it is."""
    return str(pod_of(workload)["metadata"]["labels"]["app.kubernetes.io/component"])


def _keys(workloads: list[Object]) -> Iterator[str]:
    """Both services that ask for keys do, and nobody else has the file; services say that they are, if need be by key.

    With keys and without certificates each needs a key; with certificates all have one or none.
    """
    named = {title(w): {item["name"]: item for item in container_of(w)["env"]} for w in workloads}
    keyed = any("PENSTOCK_KEYS" in names for names in named.values())
    by_key = any("PENSTOCK_KEY" in names for names in named.values())
    for workload in workloads:
        names, component = named[title(workload)], component_of(workload)
        asks = component in KEYED
        if keyed and asks and "PENSTOCK_KEYS" not in names:
            yield f"{title(workload)}: {component} asks for no keys"
        if "PENSTOCK_KEYS" in names and not asks:
            yield f"{title(workload)}: {component} has the keys file"
        wants_key = keyed and component != "queue" and (by_key or "PENSTOCK_TLS_CERT" not in names)
        if wants_key and "PENSTOCK_KEY" not in names:
            yield f"{title(workload)}: {component} has no key of a service"
        if "value" in names.get("PENSTOCK_KEY", {}):
            yield f"{title(workload)}: a key in plain sight"
        for volume in pod_of(workload)["spec"]["volumes"]:
            if "secret" in volume and volume["secret"].get("defaultMode", 0o644) & 0o007:
                yield f"{title(workload)}: {volume['name']} may be read by everybody"


def _ends(workload: Object) -> Iterator[str]:
    """What ends must get the time that it takes."""
    container = container_of(workload)
    grace_s = pod_of(workload)["spec"]["terminationGracePeriodSeconds"]
    own_s = [float(e["value"]) for e in container["env"] if e["name"].endswith("_SHUTDOWN_GRACE_S")]
    before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    takes_s = sum(own_s) + float(before[-1]) + END_S
    if grace_s < takes_s:
        yield f"is killed after {grace_s} s and takes {takes_s} s"


def _selectors(objects: list[Object], workloads: list[Object]) -> Iterator[str]:
    """Every selector chooses pods, and a workload's and a budget's those of one workload."""
    for found in objects:
        spec = found.get("spec", {})
        match found["kind"]:
            case "Service":
                selector = spec["selector"]
            case "NetworkPolicy":
                selector = spec["podSelector"]["matchLabels"]
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
                selector = spec["selector"]["matchLabels"]
            case _:
                continue
        chosen = [title(w) for w in workloads if covers(selector, pod_of(w)["metadata"]["labels"])]
        if not chosen:
            yield f"{title(found)} selects nothing"
        if found["kind"] in WORKLOADS and chosen != [title(found)]:
            yield f"{title(found)} selects {chosen}"
        if found["kind"] == "PodDisruptionBudget" and len(chosen) != 1:
            yield f"{title(found)} selects {chosen}"


def _services(objects: list[Object], workloads: list[Object]) -> Iterator[str]:
    """Every port that a Service names exists in all pods it selects, and every address is a Service's."""
    offered: set[str] = set()
    for service in of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            offered.add(f"{service['metadata']['name']}:{port['port']}")
            chosen = [w for w in workloads if covers(service["spec"]["selector"], pod_of(w)["metadata"]["labels"])]
            for workload in chosen:
                if port["targetPort"] not in {p["name"] for p in container_of(workload)["ports"]}:
                    yield f"{title(service)}: {title(workload)} has no port {port['targetPort']}"
    for workload in workloads:
        for item in container_of(workload)["env"]:
            if item["name"].endswith("_ADDRESS") and item["value"] not in offered:
                yield f"{title(workload)}: nobody serves {item['value']}"
        governing = workload["spec"].get("serviceName")
        if governing and governing not in {address.partition(":")[0] for address in offered}:
            yield f"{title(workload)}: no Service {governing}"


def _policies(objects: list[Object], workloads: list[Object]) -> Iterator[str]:
    """Who has a peer's address in its environment is let in by the peer's policy; the command line too (NOTES.txt)."""
    policies = of_kind(objects, "NetworkPolicy")
    for workload in workloads if policies else []:
        labels = pod_of(workload)["metadata"]["labels"]
        addresses = [item["value"] for item in container_of(workload)["env"] if item["name"].endswith("_ADDRESS")]
        if component_of(workload) == "queue":
            own = workload["metadata"]["name"]
            addresses += [f"{own}:7410", f"{own.removesuffix('queue')}scheduler:7420"]
        for address in addresses:
            name, _, port = address.partition(":")
            (service,) = [s for s in of_kind(objects, "Service") if s["metadata"]["name"] == name]
            if not any(_lets_in(policy, service["spec"]["selector"], labels, int(port)) for policy in policies):
                yield f"{title(workload)} may not reach {address}"


def _lets_in(policy: Object, target: dict[str, str], source: dict[str, str], port: int) -> bool:
    if not covers(policy["spec"]["podSelector"]["matchLabels"], target):
        return False
    return any(
        covers(peer["podSelector"]["matchLabels"], source)
        for rule in policy["spec"]["ingress"]
        if port in {allowed["port"] for allowed in rule["ports"]}
        for peer in rule.get("from", [])
        if "podSelector" in peer and "namespaceSelector" not in peer
    )


def _channels(objects: list[Object]) -> Iterator[str]:
    """The configuration file is one, with channels that the services take."""
    (text,) = [o["data"]["penstock.toml"] for o in of_kind(objects, "ConfigMap") if "penstock.toml" in o["data"]]
    channels = tomllib.loads(text)["channels"]
    for channel in channels:
        ChannelSettings.model_validate({name: value for name, value in channel.items() if name != "name"})
    if not all(channel["name"] for channel in channels):
        yield "a channel without a name"


def _monitoring(objects: list[Object]) -> Iterator[str]:
    """Rules are those of alerts.yaml, and what is scraped has the labels that they ask for."""
    for rule in of_kind(objects, "PrometheusRule"):
        if rule["spec"] != yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text()):
            yield f"{title(rule)} is not alerts.yaml"
    for monitor in of_kind(objects, "ServiceMonitor"):
        services = of_kind(objects, "Service")
        if not [s for s in services if covers(monitor["spec"]["selector"]["matchLabels"], s["metadata"]["labels"])]:
            yield f"{title(monitor)} selects no Service"
        given = {relabeling["targetLabel"] for relabeling in monitor["spec"]["endpoints"][0]["relabelings"]}
        if not given >= OF_THE_TARGET - {"instance"}:
            yield f"{title(monitor)} gives only {given}"


def _models(worker: Object) -> list[str]:
    """Return the names that a pool's workers answer to."""
    arguments = [str(argument) for argument in container_of(worker)["args"]]
    if "--served-model-name" not in arguments:
        return [arguments[arguments.index("--model") + 1]]
    names = arguments[arguments.index("--served-model-name") + 1 :]
    return list(itertools.takewhile(lambda name: not name.startswith("--"), names))


def lacks_models(worker: Object) -> bool:
    """Whether the model is a path in a volume that nothing fills."""
    arguments = container_of(worker)["args"]
    (volume,) = [volume for volume in pod_of(worker)["spec"]["volumes"] if volume["name"] == "models"]
    return "emptyDir" in volume and str(arguments[arguments.index("--model") + 1]).startswith("/models/")


def _pod_name(deployment: str) -> str:
    """Return what Kubernetes may call a Deployment's pod: what comes before the last five characters is cut."""
    return f"{deployment}-5d4f8b9c7d-"[:POD_PREFIX] + "x7k2p"


def _sees_its_own(query: str, scheduler: Object) -> bool:
    """Whether a query that asks for pods asks for the scheduler's, and not for those of another release."""
    pods = re.search(r'pod=~("(?:[^"\\]|\\.)*")', query)
    name = scheduler["metadata"]["name"]
    others = (f"other-{name}", f"{name.removesuffix('-scheduler')}-2-scheduler")
    return pods is None or (
        re.fullmatch(json.loads(pods[1]), _pod_name(name)) is not None
        and not any(re.fullmatch(json.loads(pods[1]), _pod_name(other)) for other in others)
    )


def _scaling(objects: list[Object], workloads: list[Object]) -> Iterator[str]:
    """What is scaled exists, by queries that name metrics and labels that do.

    Where the ServiceMonitor says where a target is, queries ask for what is this release's: by the names of its
    workers, and what is of no worker by the scheduler's pod.
    """
    (scheduler,) = [workload for workload in workloads if component_of(workload) == "scheduler"]
    for scaled in of_kind(objects, "ScaledObject"):
        targets = [w for w in workloads if w["metadata"]["name"] == scaled["spec"]["scaleTargetRef"]["name"]]
        if not targets:
            yield f"{title(scaled)} scales nothing"
        lines = re.search(r'model=~("(?:[^"\\]|\\.)*")', str(scaled["spec"]["triggers"][0]["metadata"]["query"]))
        for model in (name for target in targets for name in _models(target)):
            if lines is None or not re.fullmatch(json.loads(lines[1]), model):
                yield f"{title(scaled)} does not see the line of {model}"
        for trigger in scaled["spec"]["triggers"]:
            if not _sees_its_own(trigger["metadata"]["query"], scheduler):
                yield f"{title(scaled)} asks for other pods than the scheduler's"
            for metric, labels in selectors(trigger["metadata"]["query"]):
                placed = set()
                if of_kind(objects, "ServiceMonitor"):
                    placed = {"namespace"} if "worker" in labels else {"namespace", "pod"}
                if not placed <= labels <= documented().get(metric, frozenset()) | placed:
                    yield f"{title(scaled)}: no {metric} with {set(labels)}, or of another fleet"
