"""Carries the schedule out: each fault when its time has come and its victim can feel it."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence

from tests.chaos.disk import Disk
from tests.chaos.gauges import Gauges
from tests.chaos.process import all_gone, name_of, send
from tests.chaos.schedule import Fault, Kind
from tests.chaos.stack import CLIENT_INTERRUPTED, DISK_FREE_MIN_BYTES, Stack
from tests.support.fleet import descendants

POLL_S = 0.05

FAMILY_GONE_S = 5.0
"""Longest that the children of a killed worker may live on: the kernel kills them with it."""

ENGINE_NAMES = ("EngineCor", "VLLM::")
"""Beginnings of the name of vLLM's engine process."""


class Injector:
    """Does what the schedule says and counts what it did."""

    def __init__(self, stack: Stack, gauges: Gauges, disk: Disk | None) -> None:
        """Hit this stack; `gauges` are read a last time before each kill."""
        self._stack = stack
        self._gauges = gauges
        self._disk = disk
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.kills: Counter[str] = Counter()
        """Processes killed with kill -9, by kind of process."""
        self.others: Counter[str] = Counter()
        """Other faults, by kind."""
        self.orphans: list[str] = []
        self._do: dict[Kind, Callable[[Fault], Awaitable[None]]] = {
            Kind.KILL: self._kill,
            Kind.KILL_TWICE: self._kill_twice,
            Kind.KILL_ENGINE: self._kill_engine,
            Kind.POWER_CUT: self._power_cut,
            Kind.TERMINATE: self._terminate,
            Kind.PAUSE: self._pause,
            Kind.CUT: self._cut,
            Kind.REFUSE: self._refuse,
            Kind.STALL: self._stall,
            Kind.MUTE: self._mute,
            Kind.FILL: lambda fault: self._fill(fault, 0),
            Kind.CROWD: lambda fault: self._fill(fault, DISK_FREE_MIN_BYTES // 2),
        }

    async def run(self, faults: Sequence[Fault]) -> int:
        """Carry out all faults; return how many the batch ended before."""
        begun: list[asyncio.Task[bool]] = []
        for fault in faults:
            while self._stack.answered < fault.at and not self._stack.finished:
                await asyncio.sleep(POLL_S)
            begun.append(asyncio.create_task(self._one(fault), name=str(fault)))
        done = await asyncio.gather(*begun)
        return done.count(False)

    async def _one(self, fault: Fault) -> bool:
        """Wait for the victim's turn and for it to serve, then do it; False if there is nothing left to disturb."""
        async with self._turns[fault.target]:
            fault = self._at_a_living(fault)
            while not self._can_feel(fault):
                if self._stack.finished:
                    return False
                await asyncio.sleep(POLL_S)
            if self._stack.finished:
                return False
            self._stack.plan.say(f"{self._stack.answered:>6} answers: {fault.kind} {fault.target} {fault.seconds} s")
            await self._do[fault.kind](fault)
            return True

    def _at_a_living(self, fault: Fault) -> Fault:
        """Return the fault, at another client if the one it was meant for has done its work."""
        lanes = self._stack.lanes
        if fault.target in lanes and lanes[fault.target].done:
            return fault._replace(target=next((name for name, lane in lanes.items() if not lane.done), fault.target))
        return fault

    def _can_feel(self, fault: Fault) -> bool:
        if fault.kind is Kind.POWER_CUT:
            return True
        if fault.target in self._stack.lanes and fault.kind is not Kind.TERMINATE:
            # Also before it has begun: its start is part of what can be killed.
            lane = self._stack.lanes[fault.target]
            return lane.alive or lane.done
        if fault.target in self._stack.services or fault.target in self._stack.lanes:
            process = self._stack.process(fault.target)
            return process.serving() or process.done
        return True

    # ---- processes ----

    async def _kill(self, fault: Fault) -> None:
        await self._kill_one(fault.target, fault.seconds)

    async def _kill_one(self, name: str, away_s: float) -> None:
        process = self._stack.process(name)
        if process.done:
            return
        await self._gauges.read(name)
        family = process.kill(away_s)
        self.kills[name.split("-", maxsplit=1)[0]] += 1
        for pid in await all_gone(family, FAMILY_GONE_S):
            self.orphans.append(f"{name_of(pid)} (process {pid}) outlived {name}")

    async def _kill_twice(self, fault: Fault) -> None:
        await self._kill_one(fault.target, 0.0)
        process = self._stack.process(fault.target)
        while not process.alive:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(fault.seconds)
        await self._kill_one(fault.target, 0.0)

    async def _kill_engine(self, fault: Fault) -> None:
        process = self._stack.process(fault.target)
        family = sorted(descendants(process.pid))
        chosen = [pid for pid in family if name_of(pid).startswith(ENGINE_NAMES)] or family
        if chosen:
            await self._gauges.read(fault.target)
            process.expect_failure()
            send(chosen[0], signal.SIGKILL)
            self.kills["engine"] += 1
            while process.serving():
                await asyncio.sleep(POLL_S)

    async def _power_cut(self, fault: Fault) -> None:
        names = [process.name for process in self._stack.processes if process.alive]
        await asyncio.gather(*(self._kill_one(name, fault.seconds) for name in names))

    async def _terminate(self, fault: Fault) -> None:
        process = self._stack.process(fault.target)
        await self._gauges.read(fault.target)
        life = process.pid
        process.terminate(fault.seconds, CLIENT_INTERRUPTED if fault.target in self._stack.lanes else 0)
        self.others[fault.kind] += 1
        while process.alive and process.pid == life:
            await asyncio.sleep(POLL_S)

    async def _pause(self, fault: Fault) -> None:
        self.others[fault.kind] += 1
        await self._stack.process(fault.target).pause(fault.seconds)

    # ---- links and disk ----

    async def _cut(self, fault: Fault) -> None:
        self.others[fault.kind] += 1
        self._stack.proxies[fault.target].cut()

    async def _refuse(self, fault: Fault) -> None:
        self.others[fault.kind] += 1
        await self._stack.proxies[fault.target].refuse(fault.seconds)

    async def _stall(self, fault: Fault) -> None:
        self.others[fault.kind] += 1
        await self._stack.proxies[fault.target].stall(fault.seconds)

    async def _mute(self, fault: Fault) -> None:
        self.others[fault.kind] += 1
        await self._stack.proxies[fault.target].mute(fault.seconds)

    async def _fill(self, fault: Fault, leave_bytes: int) -> None:
        assert self._disk is not None, "disk faults are drawn only where there is a disk"
        self.others[fault.kind] += 1
        await self._disk.fill(fault.seconds, leave_bytes)
