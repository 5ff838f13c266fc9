"""What the counts of a queue tell whom: to a client the names of its channels, to others why it takes nothing.

And to everyone in which channel its batches go where it names none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import Client, Unavailable
from services.queue.settings import QueueSettings
from services.queue.storage.store import StoreError
from services.telemetry import Telemetry
from tests.support.keyed import Keyfile
from tests.support.memory_store import MemoryStore
from tests.support.serving import serving


class LostStore(MemoryStore):
    """A store whose data directory is gone."""

    def disk_free_bytes(self) -> int:
        """Raise StoreError."""
        raise StoreError("no such directory")


async def test_an_operator_is_told_why_submits_are_refused() -> None:
    async with serving(Telemetry(None), LostStore()) as peer, Client(f"127.0.0.1:{peer.port}", retry_for_s=0) as client:
        stats = await client.stats()
        assert stats.submits_refused
        assert stats.refusal.startswith("the queue's data directory cannot be read: no such directory")
        with pytest.raises(Unavailable, match=r"^the queue's data directory cannot be read: no such directory"):
            await client.submit(prompt="p")


async def test_a_client_is_told_that_there_are_numbers_it_may_not_see(tmp_path: Path) -> None:
    keyfile = Keyfile(tmp_path / "keys.toml", head="")
    keys = {role: keyfile.put(role, f'role = "{role}"') for role in ("client", "operator")}
    keyfile.write()
    async with serving(Telemetry(None), keys=keyfile.path) as peer:
        for role, only in (("client", True), ("operator", False)):
            async with Client(f"127.0.0.1:{peer.port}", api_key=keys[role]) as client:
                stats = await client.stats()
                assert (stats.names_only, len(stats.channels) > 0) == (only, True)


async def test_who_sees_every_tenant_is_told_of_which_most_waits(tmp_path: Path) -> None:
    """To whom others are not shown it would tell their names, and how busy they are."""
    keyfile = Keyfile(tmp_path / "keys.toml", head="")
    roles = {"evil": "client", "good": "client", "ops": "operator", "fleet": "service"}
    of = {"evil": '\ntenant = "evil"', "good": '\ntenant = "good"'}
    keys = {name: keyfile.put(name, f'role = "{role}"{of.get(name, "")}') for name, role in roles.items()}
    keyfile.write()
    async with serving(Telemetry(None), keys=keyfile.path) as peer:

        async def told(name: str, tenant: str = "") -> list[tuple[str, int, bool]]:
            async with Client(f"127.0.0.1:{peer.port}", api_key=keys[name], tenant=tenant) as client:
                return [(each.tenant, each.requests, each.bytes > 0) for each in (await client.stats()).tenants]

        for name, count in (("good", 1), ("evil", 3)):
            async with Client(f"127.0.0.1:{peer.port}", api_key=keys[name]) as client:
                for _ in range(count):
                    await client.submit(prompt="p")
        most = [("evil", 3, True), ("good", 1, True)]
        assert [await told(name) for name in keys] == [[], [], most, most]
        assert await told("fleet", "good") == []


async def test_without_keys_who_names_a_tenant_is_told_of_no_other() -> None:
    async with serving(Telemetry(None)) as peer:
        for tenant in ("a", "b", ""):
            async with Client(f"127.0.0.1:{peer.port}", tenant=tenant) as client:
                if tenant:
                    await client.submit(prompt="p")
                told = [each.tenant for each in (await client.stats()).tenants]
                assert sorted(told) == ([] if tenant else ["a", "b"])


async def test_everyone_is_told_where_its_batches_wait_if_it_names_no_channel(tmp_path: Path) -> None:
    keyfile = Keyfile(tmp_path / "keys.toml", head="")
    rights = {"all": "", "bulk": 'channels = ["bulk", "batch"]', "both": 'channels = ["gold", "bulk"]'}
    rights["none"] = 'channels = ["gone"]'
    keys = {name: keyfile.put(name, f'role = "client"\n{right}') for name, right in rights.items()}
    keyfile.write()
    gold_and_bulk = QueueSettings(default_channel="gold", PENSTOCK_CHANNELS={"gold": {}, "bulk": {}, "a": {}})
    async with serving(Telemetry(None), keys=keyfile.path) as peer:

        async def told(name: str) -> str:
            async with Client(f"127.0.0.1:{peer.port}", api_key=keys[name]) as client:
                return (await client.stats()).batch_channel

        assert [await told(name) for name in keys] == ["batch", "batch", "", ""]
        peer.service.reconfigure(gold_and_bulk)
        assert [await told(name) for name in keys] == ["gold", "bulk", "gold", ""]
