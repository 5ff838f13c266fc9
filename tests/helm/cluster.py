"""As much of a Kubernetes API server as Helm asks when it renders a chart: which kinds there are, and what is there."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helm.checks import Object

VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
ABSENT = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def resource(kind: str) -> str:
    """Return what a kind is called in a path."""
    lower = kind.lower()
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}s"


def discovery(objects: Sequence[Object]) -> dict[str, Any]:
    """Return what the server tells of the kinds of these objects, by path."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for found in objects:
        kinds[found["apiVersion"]].add(found["kind"])
    told: dict[str, Any] = {"/version": VERSION, "/api": {"kind": "APIVersions", "versions": ["v1"]}}
    groups = []
    for api, names in kinds.items():
        resources = [{"name": resource(k), "kind": k, "namespaced": True, "verbs": ["get"]} for k in sorted(names)]
        root = "/apis" if "/" in api else "/api"
        told[f"{root}/{api}"] = {"kind": "APIResourceList", "groupVersion": api, "resources": resources}
        if "/" in api:
            version = {"groupVersion": api, "version": api.split("/")[1]}
            groups.append({"name": api.split("/")[0], "versions": [version], "preferredVersion": version})
    return told | {"/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}}


@contextmanager
def cluster(namespace: str, kinds: Sequence[Object], there: Sequence[Object]) -> Iterator[str]:
    """Serve the objects that are `there` in the namespace, in a cluster that knows `kinds`; yields its address."""
    answers = discovery(kinds)
    for found in there:
        path = f"/apis/{found['apiVersion']}/namespaces/{namespace}/{resource(found['kind'])}"
        answers[f"{path}/{found['metadata']['name']}"] = found

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            body = json.dumps(ABSENT if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
