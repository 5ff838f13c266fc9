"""What a revoked key ends without a restart: open calls at the queue, and answers that a gateway is giving."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from penstock.credentials import Credentials
from penstock.queue.v1 import queue_pb2, queue_pb2_grpc
from penstock.tls import open_channel
from tests.integration.test_keys import (
    COMPLETION,
    PATIENCE_S,
    STATS,
    UNAUTHENTICATED,
    fleet_with_keys,
    submit,
    upload,
)
from tests.support.keyed import Keyed
from tests.support.waiting import wait_for, wait_for_async

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


TRIES = 5
"""To catch a fast engine while it runs."""


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with fleet_with_keys(tmp_path_factory.mktemp("certs"), tmp_path_factory.mktemp("keyed")) as made:
        yield made


async def test_a_revoked_key_ends_its_open_calls_without_a_restart(keyed: Keyed) -> None:
    keyed.keyfile.put("leaver", 'role = "client"\ntenant = "acme"')
    keyed.keyfile.write()
    await wait_for_async(lambda: _good(keyed, "leaver"), "the new key to be known", PATIENCE_S)
    credentials = Credentials(keyed.key("leaver"))
    async with open_channel(keyed.fleet.queue.address, [], keyed.files, credentials) as channel:
        watch = queue_pb2_grpc.QueueServiceStub(channel).Watch(queue_pb2.WatchRequest(batch="x", follow=True))
        assert await watch.read() is not grpc.aio.EOF
        keyed.keyfile.put("leaver", 'role = "client"\ntenant = "acme"\nrevoked = true')
        keyed.keyfile.write()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await watch.read()
        assert ended.value.code() is UNAUTHENTICATED
    assert await keyed.status("leaver", submit()) is UNAUTHENTICATED
    assert await keyed.status("acme", submit()) is None


def put_leaver(keyed: Keyed, revoked: bool) -> None:
    keyed.keyfile.put("late", f'role = "client"\ntenant = "acme"\nrevoked = {str(revoked).lower()}')
    keyed.keyfile.write()


@contextmanager
def answered(keyed: Keyed, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
    """Begin to read an answer as somebody whose key is good now."""
    put_leaver(keyed, revoked=False)
    wait_for(lambda: keyed.http("late", "GET", "/v1/models")[0] == 200, "the key to be known", PATIENCE_S)
    headers = {"authorization": f"Bearer {keyed.key('late')}", "content-type": "application/json"}
    connection = keyed.connection()
    try:
        connection.request(method, path, body and json.dumps(body), headers)
        yield connection.getresponse()
    finally:
        connection.close()


def test_a_revoked_key_ends_the_streams_and_answers_of_a_gateway(keyed: Keyed) -> None:
    """Also one that waits: with its worker drained, neither has a token to come."""
    origin = f"https://{keyed.fleet.services['gateway'].address}"
    assert keyed.http("ops", "POST", "/console/drain", {"worker": "w1"}, origin=origin)[0] == 200
    try:
        others = ThreadPoolExecutor(1).submit(keyed.http, "acme", "POST", "/v1/completions", COMPLETION)
        with ThreadPoolExecutor(1) as pool:
            put_leaver(keyed, revoked=False)
            wait_for(lambda: keyed.http("late", "GET", "/v1/models")[0] == 200, "the key to be known", PATIENCE_S)
            whole = pool.submit(keyed.http, "late", "POST", "/v1/completions", COMPLETION)
            wait_for(lambda: waiting(keyed) == 2, "both requests to wait", PATIENCE_S)
            put_leaver(keyed, revoked=True)
            status, answer, _ = whole.result(PATIENCE_S)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    finally:
        assert keyed.http("ops", "POST", "/console/undrain", {"worker": "w1"}, origin=origin)[0] == 200
    assert others.result(PATIENCE_S)[0] == 200, "another key of the tenant is served"
    endless = {**COMPLETION, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    for _ in range(TRIES):
        events = revoked_while_streaming(keyed, endless)
        if len(events) > 1 and b'"error"' in events[-2]:  # on a busy machine the whole answer may have come at once
            break
    assert events[-1] == b"data: [DONE]"
    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "invalid_api_key"


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Let a process stand still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def revoked_while_streaming(keyed: Keyed, body: dict[str, Any]) -> list[bytes]:
    """Return the events of a stream whose key is revoked once it has begun; the engine may be done by chance."""
    with answered(keyed, "POST", "/v1/completions", body) as response:
        assert response.readline().startswith(b"data: {")
        # Its engine would be done before the key is looked at.
        with frozen(keyed.fleet.services["worker-w1"].pid):
            put_leaver(keyed, revoked=True)
            return [line for line in response.read().splitlines() if line.startswith(b"data: ")]


def waiting(keyed: Keyed) -> int:
    state = keyed.http("ops", "GET", "/console/state")[1]
    return sum(channel["waiting"] or 0 for channel in state["channels"])


def test_a_revoked_key_ends_a_download(keyed: Keyed) -> None:
    """Of more than the connection's buffers hold."""
    size = 32 * 1024 * 1024

    def ended() -> int:
        return keyed.fleet.services["gateway"].log().count("answers end")

    before = ended()
    status, file, _ = upload(keyed, "acme", b" " * size)
    assert status == 200, file
    with answered(keyed, "GET", f"/v1/files/{file['id']}/content") as response:
        assert response.read(1000) == b" " * 1000
        put_leaver(keyed, revoked=True)
        wait_for(lambda: ended() > before, "the download to end", PATIENCE_S)
        with pytest.raises(http.client.IncompleteRead):
            response.read()
    assert keyed.http("acme", "DELETE", f"/v1/files/{file['id']}")[0] == 200


async def _good(keyed: Keyed, name: str) -> bool:
    return await keyed.status(name, STATS) is None
