"""Parts of the chaos harness: a schedule is its seed's alone, a link does as it is told, a breach is seen."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.chaos.gauges import imbalances, parse
from tests.chaos.proxy import Proxy
from tests.chaos.schedule import FULL, Kind, draw

GROUPS = {
    "queue": ["queue"],
    "scheduler": ["scheduler"],
    "worker": ["worker-1", "worker-2"],
    "client": ["client-1", "client-2"],
    "link": ["scheduler>queue", "worker-1>queue"],
    "work-link": ["worker-1>queue"],
    "disk": ["disk"],
    "all": ["all"],
}


def test_a_seed_is_a_schedule() -> None:
    faults = draw(7, 3000, FULL, GROUPS)
    assert faults == draw(7, 3000, FULL, GROUPS) != draw(8, 3000, FULL, GROUPS)
    assert faults == sorted(faults)
    assert Counter(fault.kind for fault in faults) == Counter(row.kind for row in FULL for _ in range(row.times))
    assert all(0 < fault.at < 3000 * 0.9 for fault in faults)


def test_the_schedule_has_kills_enough_and_few_of_workers() -> None:
    kills = {Kind.KILL: 1, Kind.KILL_TWICE: 2, Kind.KILL_ENGINE: 1}
    by_group = Counter[str]()
    for row in FULL:
        by_group[row.group] += kills.get(row.kind, 0) * row.times
    assert by_group.total() >= 30
    assert by_group["worker"] <= by_group.total() / 4


def test_a_group_without_members_gets_no_faults() -> None:
    faults = draw(1, 100, FULL, {**GROUPS, "disk": []})
    assert not {Kind.FILL, Kind.CROWD} & {fault.kind for fault in faults}


async def test_a_link_is_cut_refused_stalled_and_muted() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    upstream = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy("a>b", f"127.0.0.1:{upstream.sockets[0].getsockname()[1]}")
    await proxy.start()
    host, port = proxy.address.split(":")

    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"

    stalled = asyncio.create_task(proxy.stall(0.1))
    await asyncio.sleep(0)
    writer.write(b"two")
    assert await reader.readexactly(3) == b"two"
    assert stalled.done(), "nothing was carried before the stall was over"

    muted = asyncio.create_task(proxy.mute(0.1))
    await asyncio.sleep(0)
    writer.write(b"six")
    assert await reader.readexactly(3) == b"six"
    assert muted.done(), "no answer was carried before it was over"

    proxy.cut()
    with pytest.raises(ConnectionError):
        await reader.readexactly(1)

    refusing = asyncio.create_task(proxy.refuse(0.1))
    await asyncio.sleep(0)
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(host, port)
    await refusing
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"three")
    assert await reader.readexactly(5) == b"three"
    await proxy.close()
    upstream.close()


def test_a_ledger_that_does_not_add_up_is_seen() -> None:
    page = "\n".join(
        [
            'penstock_scheduler_capacity_blocks{worker="w1"} 10.0',
            'penstock_scheduler_overcommitted_blocks{worker="w1"} 0.0',
            'penstock_scheduler_free_blocks{worker="w1"} 4.0',
            'penstock_scheduler_held_blocks{worker="w1",channel="batch"} 5.0',
            'penstock_scheduler_held_blocks{worker="w1",channel="interactive"} 1.0',
        ]
    )
    assert imbalances(parse(page)) == []
    assert imbalances(parse(page.replace("} 5.0", "} 6.0"))) == ["w1: free + held is off by 1 blocks"]
