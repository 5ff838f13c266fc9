"""What the counts of a queue with keys tell a client: the names of its channels."""

from __future__ import annotations

from pathlib import Path

from penstock import Client
from services.telemetry import Telemetry
from tests.support.keyed import Keyfile
from tests.support.serving import serving


async def test_a_client_is_told_that_there_are_numbers_it_may_not_see(tmp_path: Path) -> None:
    keyfile = Keyfile(tmp_path / "keys.toml", head="")
    keys = {role: keyfile.put(role, f'role = "{role}"') for role in ("client", "operator")}
    keyfile.write()
    async with serving(Telemetry(None), keys=keyfile.path) as peer:
        for role, only in (("client", True), ("operator", False)):
            async with Client(f"127.0.0.1:{peer.port}", api_key=keys[role]) as client:
                stats = await client.stats()
                assert (stats.names_only, len(stats.channels) > 0) == (only, True)
