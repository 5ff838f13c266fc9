"""GetMany: where many requests are, by their keys, and as many of their results as one answer has room for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from unittest.mock import patch

import grpc
import pytest

from penstock import Client
from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from services.queue.core.effects import Write
from services.queue.core.records import IDEMPOTENCY, RESULTS, idempotency_key, seq_key
from services.queue.storage.reader import PAGE_BYTES
from services.queue.storage.store import StoreDamagedError
from services.queue.wire import StoredResult
from services.telemetry import Telemetry
from tests.support.keyed import Keyfile
from tests.support.serving import COMPLETED, Peer, ids, refused, serving, text

READY, LEASED = pb.REQUEST_STATE_READY, pb.REQUEST_STATE_LEASED
DONE, DEAD = pb.REQUEST_STATE_DONE, pb.REQUEST_STATE_DEAD


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving(Telemetry(None)) as peer:
        yield peer


async def asked(peer: Peer, *keys: str) -> list[pb.GetResponse]:
    """Return what the queue says of the first of these keys."""
    return list((await peer.stub.GetMany(pb.GetManyRequest(keys=keys))).requests)


async def ended(peer: Peer, *sizes_bytes: int) -> list[str]:
    """Have requests with the keys "0", "1" and so on end with results of these sizes; return their names."""
    requests = [text(idempotency_key=str(place), client_reference=f"ref-{place}") for place in range(len(sizes_bytes))]
    names = await peer.submit(*requests)
    work = await peer.work()
    for name, size_bytes in zip(names, sizes_bytes, strict=True):
        result = request_pb2.Result(outcome=COMPLETED, choices=[request_pb2.Choice(text="x" * size_bytes)])
        await work.complete((await work.claim(name)).lease, result=result)
    return names


async def test_each_is_told_as_get_tells_it(peer: Peer) -> None:
    requests = [text(idempotency_key=key, client_reference=f"ref-{key}") for key in ("done", "dead", "leased", "ready")]
    done, dead, leased, ready = await peer.submit(*requests)
    work = await peer.work()
    await work.complete((await work.claim(done)).lease)
    for _ in range(2):
        failure = request_pb2.RequestError(code="oom", message="out of memory")
        await work.complete((await work.claim(dead)).lease, failure=failure)
    await work.claim(leased)
    found = await asked(peer, "ready", "nobody's", "done", "dead", "leased", "done")
    assert [one.request_id for one in found] == [ready, "", done, dead, leased, done]
    assert [one.state for one in found] == [READY, 0, DONE, DEAD, LEASED, DONE]
    assert [one.HasField("result") for one in found] == [False, False, True, True, False, True]
    for one in found:
        if one.request_id:
            single = await peer.stub.Get(pb.GetRequest(request_id=one.request_id))
            if one.state == DONE:
                single = pb.GetResponse(request_id=single.request_id, state=DONE, result=single.result)
            assert one == single
    assert found[2].result.client_reference == "ref-done"
    await peer.stub.Delete(pb.DeleteRequest(request_ids=ids(done)))
    assert [one.request_id for one in await asked(peer, "done", "ready")] == ["", ready]


async def test_a_dead_letter_that_was_requeued_has_no_result_until_it_ends_anew(peer: Peer) -> None:
    (name,) = await peer.submit(text(idempotency_key="k"))
    work = await peer.work()
    for _ in range(2):
        await work.complete((await work.claim(name)).lease, failure=request_pb2.RequestError(code="oom"))
    await peer.stub.RequeueDead(pb.RequeueDeadRequest(request_ids=ids(name)))
    (found,) = await asked(peer, "k")
    assert (found.state, found.HasField("result")) == (READY, False)


async def test_one_that_ends_while_it_is_looked_up_is_told_as_it_was(peer: Peer) -> None:
    (name,) = await peer.submit(text(idempotency_key="k"))
    work = await peer.work()
    lease = (await work.claim(name)).lease
    reader = peer.service._admin._reader
    real = reader.first_results

    async def late(seqs: Sequence[int], sees: str | None) -> list[StoredResult | None]:
        await work.complete(lease)
        return await real(seqs, sees)

    with patch.object(reader, "first_results", late):
        (found,) = await asked(peer, "k")
    assert (found.state, found.HasField("result")) == (LEASED, False)
    (found,) = await asked(peer, "k")
    assert (found.state, found.HasField("result")) == (DONE, True)


async def test_of_large_results_few_are_read_beyond_what_is_told(peer: Peer) -> None:
    await ended(peer, *[PAGE_BYTES // 4] * 40)
    store, read = peer.service._store, 0
    get_many = store.get_many

    def counted(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        nonlocal read
        read += len(keys) if family == RESULTS else 0
        return get_many(family, keys)

    with patch.object(store, "get_many", counted):
        assert len(await asked(peer, *map(str, range(40)))) == 4
    assert read <= 8


async def test_an_answer_has_the_first_of_them_up_to_a_page_and_one_result(peer: Peer) -> None:
    """Large ones after small ones, of which many are read at once."""
    sizes_bytes = [10] * 100 + [PAGE_BYTES // 3] * 4 + [PAGE_BYTES * 2] * 2 + [10]
    names = await ended(peer, *sizes_bytes)
    told: list[str] = []
    counts: list[int] = []
    while len(told) < len(names):
        found = await asked(peer, *map(str, range(len(told), len(names))))
        counts.append(len(found))
        told += [one.request_id for one in found]
    assert told == names
    assert counts == [103, 2, 1, 1]


async def test_what_has_no_result_takes_room_too(peer: Peer) -> None:
    requests = [text(idempotency_key=str(place), client_reference="x" * 4096) for place in range(300)]
    names = await peer.submit(*requests)
    found = await asked(peer, *map(str, range(300)))
    assert [one.request_id for one in found] == names[: len(found)]
    assert PAGE_BYTES // 4200 <= len(found) <= PAGE_BYTES // 4096 + 1


async def test_an_answer_ends_before_a_result_that_is_damaged(peer: Peer) -> None:
    names = await ended(peer, *[10] * 5)
    peer.service._store.write([Write(RESULTS, seq_key(4), b"no result at all")])
    assert [one.request_id for one in await asked(peer, *"01234")] == names[:3]
    await refused(peer.stub.GetMany(pb.GetManyRequest(keys=["3", "4"])), grpc.StatusCode.DATA_LOSS, "row")
    assert [one.request_id for one in await asked(peer, "4")] == names[4:]


async def test_a_key_that_is_damaged_keeps_none_before_it(peer: Peer) -> None:
    names = await ended(peer, *[10] * 8)
    store = peer.service._store
    bad, get_many = idempotency_key("default", "6"), store.get_many

    def get_some(family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        if family == IDEMPOTENCY and bad in keys:
            raise StoreDamagedError("Corruption")
        return get_many(family, keys)

    with patch.object(store, "get_many", get_some):
        told: list[str] = []
        while len(told) < 6:
            told += [one.request_id for one in await asked(peer, *map(str, range(len(told), 8)))]
        assert told == names[:6]
        await refused(peer.stub.GetMany(pb.GetManyRequest(keys=["6", "7"])), grpc.StatusCode.DATA_LOSS, "Corruption")


async def test_the_keys_of_another_tenant_are_unknown(tmp_path: Path) -> None:
    keyfile = Keyfile(tmp_path / "keys.toml", head="")
    keys = {tenant: keyfile.put(tenant, f'role = "client"\ntenant = "{tenant}"') for tenant in ("acme", "beta")}
    keys["ops"] = keyfile.put("ops", 'role = "operator"')
    keyfile.write()
    async with serving(Telemetry(None), keys=keyfile.path) as peer:
        address = f"127.0.0.1:{peer.port}"
        async with (
            Client(address, api_key=keys["acme"]) as acme,
            Client(address, api_key=keys["beta"]) as beta,
            Client(address, api_key=keys["ops"]) as ops,
        ):
            waiting = await acme.submit(prompt="p", idempotency_key="waiting")
            ended = await acme.submit(prompt="p", idempotency_key="ended")
            await acme.cancel(ended)

            async def seen(client: Client, tenant: str = "") -> list[str]:
                request = pb.GetManyRequest(tenant=tenant, keys=["waiting", "ended"])
                return [one.request_id for one in (await client.wire_get_many(request)).requests]

            assert await seen(acme) == [waiting, ended] == await seen(acme, "acme") == await seen(ops, "acme")
            assert await seen(beta) == ["", ""] == await seen(beta, "acme") == await seen(ops)
