"""Channels are reconfigured and certificates rotated while requests run: none fails, and the new shares show."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import penstock as public
from penstock.dev_ca import Authority
from penstock.tls import TlsFiles
from tests.support.fleet import Fleet, Service

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(240)]

ENGINE = ["--engine", "simulated", "--profile", "cpu-tiny", "--num-gpu-blocks-override", "65", "--max-num-seqs", "32"]
"""64 blocks, and steps that take time: both channels always have requests that wait for blocks."""

WAITING = 40
"""Requests of each channel that wait or run all the time."""

LOCAL = ["localhost", "127.0.0.1"]


def channel(name: str, weight: float, guaranteed_share: float = 0.0, ceiling_share: float = 1.0, tier: int = 0) -> str:
    return (
        f'[[channels]]\nname = "{name}"\nweight = {weight}\nguaranteed_share = {guaranteed_share}\n'
        f"ceiling_share = {ceiling_share}\ntier = {tier}\n"
    )


class Site:
    """A fleet that reads one file and one set of certificates, and a client of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certs = directory / "certs"
        self.file = directory / "penstock.toml"
        self.issue()
        self.write(channel("a", 1), channel("b", 1))
        self.fleet = Fleet(directory / "fleet", {"PENSTOCK_CONFIG": str(self.file)})

    def issue(self) -> None:
        """Make new certificates in the place of the present ones."""
        authority = Authority.open(self.certs)
        authority.issue(self.certs, "service", 1, LOCAL)
        authority.issue(self.certs, "client", 1, None)

    def write(self, *channels: str) -> None:
        """Put a new file in the place of the present one."""
        tls = "".join(
            f'tls_{key} = "{self.certs / name}"\n'
            for key, name in (("ca", "ca.pem"), ("cert", "service.pem"), ("key", "service-key.pem"))
        )
        new = self.file.with_suffix(".new")
        new.write_text(f'[common]\n{tls}[queue]\ndefault_channel = "a"\n{"".join(channels)}')
        os.replace(new, self.file)

    def hang_up(self) -> None:
        """Have queue and scheduler read the file at once."""
        for service in (self.fleet.queue, self.fleet.scheduler):
            os.kill(service.pid, signal.SIGHUP)

    def client(self) -> public.Client:
        names = ("ca.pem", "client.pem", "client-key.pem")
        files = TlsFiles(*(str(self.certs / name) for name in names))
        return public.Client(self.fleet.queue.address, self.fleet.scheduler.address, retry_for_s=30, tls=files)


async def reach(fact: Callable[[], Awaitable[object]]) -> None:
    """Wait until `fact` holds; the test's own limit ends a wait that is in vain."""
    while not await fact():
        await asyncio.sleep(0.05)


@asynccontextmanager
async def load(client: public.Client, outcomes: list[public.Outcome]) -> AsyncIterator[None]:
    """Keep WAITING requests of each channel going, each followed by another; note how each ended."""
    stopping = False

    async def one_after_another(name: str) -> None:
        while not stopping:
            result = await client.generate(prompt="word " * 40, max_tokens=12, channel=name)
            outcomes.append(result.outcome)

    running = [asyncio.create_task(one_after_another(name)) for name in ("a", "b") for _ in range(WAITING)]
    try:
        yield
    finally:
        stopping = True
        await asyncio.gather(*running)


async def granted(client: public.Client) -> dict[str, int]:
    return {view.channel: view.grants for view in (await client.fleet()).channels}


async def part_of_a(client: public.Client, grants: int) -> float:
    """Return the part of the next `grants` grants of "a" and "b" that "a" has."""
    first = await granted(client)
    while True:
        now = await granted(client)
        a, b = now["a"] - first["a"], now["b"] - first["b"]
        if a + b >= grants:
            return a / (a + b)
        await asyncio.sleep(0.05)


async def comes_to(client: public.Client, least: float, most: float, grants: int) -> None:
    """Wait until the part that "a" has of so many grants is within these limits.

    Not at the first look, because a pause of one process shows in it; other weights never come to it.
    """
    while not least <= await part_of_a(client, grants) <= most:
        pass


async def has_weight(client: public.Client, name: str, weight: float) -> bool:
    return {view.channel: view.weight for view in (await client.fleet()).channels}.get(name) == weight


async def refused_by(service: Service) -> bool:
    return "the configuration is no good, and the running one stays" in service.log()


async def is_refused(client: public.Client, name: str) -> bool:
    """Whether the queue takes no more requests of the channel."""
    try:
        await client.submit(prompt="x", max_tokens=1, channel=name)
    except public.InvalidRequest:
        return True
    return False


async def test_reconfigured_and_rotated_under_load_no_request_fails(tmp_path: Path) -> None:
    site = Site(tmp_path)
    outcomes: list[public.Outcome] = []
    try:
        site.fleet.start_core()
        site.fleet.add_worker("w1", ENGINE)
        async with site.client() as client, load(client, outcomes):
            await part_of_a(client, 80)  # until requests of both wait
            await comes_to(client, 0.35, 0.65, 100)

            # New weights, found by the services themselves.
            site.write(channel("a", 9), channel("b", 1))
            await reach(lambda: has_weight(client, "a", 9))
            site.issue()
            await part_of_a(client, 80)  # what was granted before runs out
            await comes_to(client, 0.82, 0.98, 150)

            # A damaged file: both say so, and go on as they were.
            site.file.write_text(site.file.read_text().replace("weight = 9", "weight = 0"))
            site.hang_up()
            await reach(lambda: refused_by(site.fleet.queue))
            await reach(lambda: refused_by(site.fleet.scheduler))
            assert await has_weight(client, "a", 9)

            # Another channel, with a tier and a ceiling; requests of it are taken and served at once.
            site.write(channel("a", 1, ceiling_share=0.25), channel("b", 1), channel("late", 1, tier=1))
            site.hang_up()
            await reach(lambda: has_weight(client, "late", 1))
            site.issue()
            await part_of_a(client, 80)
            await comes_to(client, 0, 0.35, 100)

            # It is removed again while requests wait in it, which are served all the same.
            while await is_refused(client, "late"):
                await asyncio.sleep(0.05)  # the queue reads the file for itself
            ids = [await client.submit(prompt="x", max_tokens=4, channel="late") for _ in range(10)]
            site.write(channel("a", 1), channel("b", 1))
            site.hang_up()
            await reach(lambda: is_refused(client, "late"))
            outcomes += [(await client.result(name)).outcome for name in ids]
        assert len(outcomes) > 300
        assert set(outcomes) == {public.Outcome.COMPLETED}
        assert "audit found" not in site.fleet.logs()
        for service in (site.fleet.queue, site.fleet.scheduler):
            assert service.lives == 1
            assert service.running
    finally:
        site.fleet.close()
