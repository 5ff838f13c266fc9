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
