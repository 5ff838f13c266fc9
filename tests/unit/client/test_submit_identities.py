"""Standing submit streams and a queue with keys: each serves one caller, and as long as that one's rights last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import penstock
from penstock import submit_line
from penstock.credentials import acting_for, pass_on
from services.auth import guard
from services.telemetry import Telemetry
from tests.support.fake_queue import FakeQueue
from tests.support.fake_queue import serving as serving_fake
from tests.support.keyed import Keyfile
from tests.support.memory_store import MemoryStore
from tests.support.serving import Peer, serving
from tests.support.waiting import wait_for_async


@dataclass
class Asked:
    """A queue with keys, and ways to be its client."""

    peer: Peer
    keyfile: Keyfile

    def client(self, key: str = "", tenant: str = "") -> penstock.Client:
        key = self.keyfile.keys.get(key, key)
        return penstock.Client(f"127.0.0.1:{self.peer.port}", retry_for_s=5, api_key=key, tenant=tenant)

    async def change(self, head: str | None = None, **fields: str) -> None:
        """Put the file with other keys into place, and wait until it is in force."""
        for name, text in fields.items():
            self.keyfile.put(name, text)
        self.keyfile.head = self.keyfile.head if head is None else head
        self.keyfile.write()
        keyring = self.peer.service._keyring
        assert keyring is not None
        stamp = keyring._stamped()

        async def read() -> bool:
            return keyring._stamp == stamp

        await wait_for_async(read, "the keys to be read")

    def tenant_of(self, name: str) -> str:
        entry = self.peer.service.committer.machine.book.find(name)
        assert entry is not None
        return entry.meta.tenant


@pytest.fixture
async def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asked]:
    monkeypatch.setattr(guard, "POLL_S", 0.01)
    keyfile = Keyfile(tmp_path / "keys.toml", head="[tenants.small]\nmax_waiting_requests = 1\n\n")
    keyfile.put("acme", 'role = "client"\ntenant = "acme"')
    keyfile.put("acme-batch", 'role = "client"\ntenant = "acme"\nchannels = ["batch"]')
    keyfile.put("beta", 'role = "client"\ntenant = "beta"')
    keyfile.put("small", 'role = "client"\ntenant = "small"')
    keyfile.put("ops", 'role = "operator"')
    keyfile.put("service", 'role = "service"')
    keyfile.write()
    async with serving(Telemetry(None), MemoryStore(), keyfile.path) as peer:
        yield Asked(peer, keyfile)


def open_streams(asked: Asked) -> int:
    return len(asked.peer.service.servicer._submits)


async def told(client: penstock.Client, **fields: object) -> tuple[type[Exception], str, str, str]:
    """Return what a submit raises: the kind, the text, and field and code if it has them."""
    with pytest.raises(penstock.PenstockError) as raised:
        await client.submit(prompt="p", **fields)  # type: ignore[arg-type]
    error = raised.value
    return type(error), str(error), getattr(error, "param", ""), getattr(error, "code", "")


REFUSED: list[tuple[str, dict[str, object], type[Exception]]] = [
    ("acme", {"channel": "nowhere"}, penstock.InvalidRequest),
    ("acme", {"max_tokens": 0}, penstock.InvalidRequest),
    ("acme", {"stop": [""]}, penstock.InvalidRequest),
    ("acme", {"deadline_unix_ns": 1}, penstock.InvalidRequest),
    ("acme", {"idempotency_key": "x" * 1000}, penstock.InvalidRequest),
    ("acme-batch", {"channel": "interactive"}, penstock.PermissionDenied),
    ("small", {}, penstock.QuotaExceeded),
    ("nonsense", {}, penstock.Unauthenticated),
    ("penstock.acme.wrong", {}, penstock.Unauthenticated),
    ("service", {}, penstock.PermissionDenied),
]


@pytest.mark.parametrize(("key", "fields", "kind"), REFUSED)
async def test_a_refusal_is_that_of_a_unary_call(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, key: str, fields: dict[str, object], kind: type[Exception]
) -> None:
    async with asked.client("small") as small:
        await small.submit(prompt="all that its quota has room for")
    async with asked.client(key) as client:
        over_a_stream = await told(client, **fields)
        monkeypatch.setattr(submit_line, "TARGET_FRAME_BYTES", 0)  # none fits a frame
        by_a_call = await told(client, **fields)
    assert over_a_stream[0] is kind
    assert _timeless(over_a_stream) == _timeless(by_a_call)


def _timeless(told: tuple[type[Exception], str, str, str]) -> tuple[str, ...]:
    """Return it without how long ago a deadline passed, and without the method's name."""
    text = told[1].split(" passed ")[0].replace("SubmitUnary", "Submit")
    return told[0].__name__, text, *told[2:]


async def test_a_full_disk_is_told_as_by_a_unary_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Telemetry(None), MemoryStore(disk_free_bytes=1)) as peer:
        peer.service.committer.health.check_disk()
        async with penstock.Client(f"127.0.0.1:{peer.port}", retry_for_s=60) as client, asyncio.timeout(30):
            over_a_stream = await told(client)
            monkeypatch.setattr(submit_line, "TARGET_FRAME_BYTES", 0)
            assert over_a_stream == await told(client)
    assert over_a_stream[0] is penstock.Unavailable
    assert "watermark" in over_a_stream[1]


async def test_a_key_that_is_no_good_is_told_to_all_and_asked_again_later(asked: Asked) -> None:
    key = asked.keyfile.put("late", 'role = "client"\ntenant = "acme"')  # not written yet
    async with asked.client(key) as client:
        answers = await asyncio.gather(*(client.submit(prompt="p") for _ in range(20)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {penstock.Unauthenticated}
        await asked.change()
        assert asked.tenant_of(await client.submit(prompt="p")) == "acme"
        assert open_streams(asked) == 1


async def test_a_revoked_key_submits_no_more(asked: Asked) -> None:
    async with asked.client("acme") as client:
        await client.submit(prompt="p")
        assert open_streams(asked) == 1
        await asked.change(acme='role = "client"\ntenant = "acme"\nrevoked = true')
        assert await told(client) == (penstock.Unauthenticated, "the API key has been revoked", "", "")
        assert open_streams(asked) == 0


@pytest.mark.parametrize("what", ["key", "tenant", "service"])
async def test_channels_that_change_hold_for_the_next_submit(asked: Asked, what: str) -> None:
    client = asked.client("service", tenant="acme") if what == "service" else asked.client("acme")
    async with client:
        await client.submit(prompt="p", channel="interactive")
        if what == "key":
            await asked.change(acme='role = "client"\ntenant = "acme"\nchannels = ["batch"]')
        else:
            await asked.change(head='[tenants.acme]\nchannels = ["batch"]\n\n')
        assert (await told(client, channel="interactive"))[0] is penstock.PermissionDenied
        await client.submit(prompt="p", channel="batch")
        await asked.change(head="", acme='role = "client"\ntenant = "acme"')
        await client.submit(prompt="p", channel="interactive")


ACME = 'role = "client"\ntenant = "acme"\n'

CHANGES: list[dict[str, str]] = [
    {"head": '[tenants.acme]\nchannels = ["batch"]\n\n'},
    {"acme": f'{ACME}channels = ["batch"]'},
]
"""Of the channels that a caller may submit to."""


@pytest.mark.parametrize("change", CHANGES)
async def test_other_open_calls_outlive_a_change_of_channels(asked: Asked, change: dict[str, str]) -> None:
    calls = asked.peer.service._guard._calls

    async def open_calls(count: int) -> bool:
        return len(calls) == count

    async with asked.client("acme") as client:
        name = await client.submit(prompt="p")
        (submits,) = calls
        waiting = asyncio.create_task(client.result(name))
        await wait_for_async(lambda: open_calls(2), "the result to be followed")
        (follows,) = (call for call in calls if call is not submits)
        await asked.change(**change)
        await wait_for_async(lambda: open_calls(1), "the submit stream to end")
        assert [*calls] == [follows]
        assert follows.interruption._error is None
        await client.cancel(name)
        assert (await waiting).outcome is penstock.Outcome.CANCELLED


async def test_all_open_calls_outlive_another_end_of_their_key(asked: Asked) -> None:
    calls = asked.peer.service._guard._calls
    async with asked.client("acme") as client:
        await client.submit(prompt="p")
        (submits,) = calls
        await asked.change(acme=f"{ACME}expires = 2100-01-01T00:00:00Z")
        await client.submit(prompt="p")
        assert [*calls] == [submits]
        assert submits.interruption._error is None
        await asked.change(acme=f"{ACME}expires = 2001-01-01T00:00:00Z")
        assert (await told(client))[0] is penstock.Unauthenticated


@pytest.mark.parametrize("change", CHANGES)
async def test_many_submits_go_on_when_their_channels_change(asked: Asked, change: dict[str, str]) -> None:
    changed = asyncio.Event()

    async def source() -> AsyncIterator[penstock.RequestFields]:
        yield {"prompt": "p", "channel": "interactive"}
        await changed.wait()
        yield {"prompt": "p", "channel": "interactive"}
        yield {"prompt": "p", "channel": "batch"}

    async with asked.client("acme") as client:
        acks = client.submit_many(source())
        assert (await anext(acks)).error is None
        (before,) = asked.peer.service.servicer._submits
        await asked.change(**change)

        async def ended() -> bool:
            return before not in asked.peer.service.servicer._submits

        await wait_for_async(ended, "the stream to end")
        changed.set()
        rest = sorted([ack async for ack in acks], key=lambda ack: ack.index)
    assert [ack.error and ack.error.code for ack in rest] == ["permission_denied", None]


async def as_client(client: penstock.Client, key: str) -> str:
    """Submit as a gateway does that serves somebody with this key."""

    async def passed_on() -> str:
        pass_on(f"Bearer {key}")
        return await client.submit(prompt="p")

    return await asyncio.create_task(passed_on())


@pytest.mark.parametrize("most", [submit_line.MAX_LINES, 1, 0])
async def test_each_stream_is_one_callers(asked: Asked, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Also when there are more callers than streams."""
    monkeypatch.setattr(submit_line, "MAX_LINES", most)
    keys = asked.keyfile.keys
    async with asked.client("service", tenant="own") as gateway:

        async def acting(tenant: str) -> str:
            with acting_for(tenant):
                return await gateway.submit(prompt="p")

        for _ in range(3):
            names = await asyncio.gather(
                as_client(gateway, keys["acme"]),
                as_client(gateway, keys["beta"]),
                acting("gamma"),
                gateway.submit(prompt="p"),
            )
            assert [asked.tenant_of(name) for name in names] == ["acme", "beta", "gamma", "own"]
            with pytest.raises(penstock.Unauthenticated):
                await as_client(gateway, "penstock.acme.wrong")
            with pytest.raises(penstock.Unauthenticated):
                await as_client(gateway, "")
        assert open_streams(asked) == min(most, 4)


async def test_callers_without_keys_share_a_stream() -> None:
    """A gateway passes on that its clients gave none."""
    queue = FakeQueue()
    async with serving_fake(queue) as address, penstock.Client(address, api_key="own") as gateway:
        for _ in range(3):
            await as_client(gateway, "one")
            await as_client(gateway, "two")
    assert [stream["authorization"] for stream in queue.submit_streams] == ["Bearer one", "Bearer two"]
    assert queue.unary_submits == 0
