"""The network: streams ordered each way and with nothing else, partitions, slow links, half-open ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.world import Process, World

CLOSE = object()
"""Travels behind a stream's last message."""

UP, DOWN = 0, 1
"""The two ways of a stream: to its server, to its client."""


class Stream:
    """One bidirectional stream between two lives. Index `way` names the end that receives that way."""

    def __init__(self, net: Network, client: Process, server: Process) -> None:
        """Make an open stream; both ends set what is called when something arrives and when it is over."""
        self._net = net
        self.ends = (server, client)
        now_ns = net.world.now_ns()
        self._last_ns = [now_ns, now_ns]
        self._travelling: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self.closed = [False, False]
        self.label = 0
        """Whatever number the server knows the stream by."""
        self.hear: list[Callable[[Any], None]] = [_ignore, _ignore]
        self.over: list[Callable[[], None]] = [_nothing, _nothing]

    def up(self, message: Any) -> None:
        """Send from client to server."""
        self._send(UP, message)

    def down(self, message: Any) -> None:
        """Send from server to client."""
        self._send(DOWN, message)

    def _send(self, way: int, message: Any) -> None:
        if self.closed[1 - way]:
            return
        self._travelling[way].append(message)
        self._plan(way)

    def _plan(self, way: int) -> None:
        net = self._net
        when_ns = net.world.now_ns() + net.delay_ns(self.ends[1 - way], self.ends[way])
        self._last_ns[way] = when_ns = max(self._last_ns[way], when_ns)
        net.world.at(when_ns, self._arrive, way)

    def _arrive(self, way: int) -> None:
        if self.closed[way] or not self._travelling[way]:
            return
        world = self._net.world
        until_ns = self._net.blocked_until_ns(self.ends[1 - way], self.ends[way])
        if until_ns > world.now_ns():
            # The packets are sent again and again; order is kept, for each arrival takes the oldest.
            self._last_ns[way] = max(self._last_ns[way], until_ns)
            world.at(until_ns, self._arrive, way)
            return
        message = self._travelling[way].popleft()
        if message is CLOSE:
            self.end(way)
        else:
            self.hear[way](message)

    def snap(self) -> None:
        """Break the connection: what travels is lost, and each end learns of it at a time of its own."""
        for way in (UP, DOWN):
            self._travelling[way].clear()
            self._net.world.after(self._net.delay_ns(*self.ends), self.end, way)

    def close(self, way: int) -> None:
        """Close at the end that receives `way`; the other end hears of it behind what was sent before."""
        if not self.closed[way]:
            self.closed[way] = True
            self._net.forget(self)
            if not self.closed[1 - way]:
                self._travelling[1 - way].append(CLOSE)
                self._plan(1 - way)

    def kill(self, way: int, keep: bool) -> None:
        """The process at this end is dead; `keep` if what it had sent still arrives."""
        if not keep:
            self._travelling[1 - way].clear()
        self.close(way)

    def end(self, way: int) -> None:
        """Have the end that receives `way` find that the stream is over."""
        if not self.closed[way]:
            self.close(way)
            self.over[way]()

    def time_out(self, way: int) -> None:
        """Have a keepalive fail at one end if the other still cannot be reached and heard."""
        server, client = self.ends
        until_ns = max(self._net.blocked_until_ns(server, client), self._net.blocked_until_ns(client, server))
        if until_ns > self._net.world.now_ns():
            self.end(way)

    def give_up(self) -> None:
        """Have a keepalive fail at the client if the server's process is still stopped."""
        if self.ends[UP].is_stalled:
            self.end(DOWN)


class Network:
    """Who reaches whom, and how fast."""

    def __init__(self, world: World, most_delay_ns: int, keepalive_ns: int) -> None:
        """Deliver within `most_delay_ns`; ends notice a partition after `keepalive_ns`."""
        self.world = world
        self._most_delay_ns = most_delay_ns
        self._keepalive_ns = keepalive_ns
        self._blocked: dict[tuple[Process, Process], int] = {}
        self._slow: dict[tuple[Process, Process], tuple[int, int]] = {}
        self._streams: dict[Stream, None] = {}

    def connect(self, client: Process, server: Process) -> Stream | None:
        """Open a stream; None if the server is down or cannot be reached both ways."""
        now_ns = self.world.now_ns()
        cut_off = max(self.blocked_until_ns(client, server), self.blocked_until_ns(server, client)) > now_ns
        if cut_off or not server.up:
            return None
        stream = Stream(self, client, server)
        self._streams[stream] = None
        return stream

    def forget(self, stream: Stream) -> None:
        """Drop a stream of which both ends are closed."""
        if all(stream.closed):
            self._streams.pop(stream, None)

    def between(self, one: Process, other: Process) -> list[Stream]:
        """Return the streams between two processes."""
        return [stream for stream in self._streams if stream.ends in ((one, other), (other, one))]

    def kill(self, process: Process, keep: bool) -> None:
        """Cut every stream of a process that died."""
        for stream in list(self._streams):
            for way in (UP, DOWN):
                if stream.ends[way] is process and not stream.closed[way]:
                    stream.kill(way, keep)

    def blocked_until_ns(self, sender: Process, receiver: Process) -> int:
        """Return until when nothing gets from one to the other."""
        return self._blocked.get((sender, receiver), 0)

    def delay_ns(self, sender: Process, receiver: Process) -> int:
        """Draw the delay of one message."""
        delay_ns = self.world.draw_ns(self._most_delay_ns)
        until_ns, factor = self._slow.get((sender, receiver), (0, 1)) if self._slow else (0, 1)
        return delay_ns * factor if until_ns > self.world.now_ns() else delay_ns

    def partition(self, one: Process, other: Process, duration_ns: int, to: bool, fro: bool) -> None:
        """Let nothing through for a while: from `one` `to` `other`, `fro`, or both."""
        until_ns = self.world.now_ns() + duration_ns
        for blocked, pair in ((to, (one, other)), (fro, (other, one))):
            if blocked:
                self._blocked[pair] = max(until_ns, self._blocked.get(pair, 0))
        for stream in self.between(one, other):
            for way in (UP, DOWN):
                self.world.after(self._keepalive_ns + self.world.draw_ns(self._keepalive_ns), stream.time_out, way)

    def freeze(self, server: Process) -> None:
        """Have those who call a server that was stopped notice it, if it is stopped for long."""
        for stream in self._streams:
            if stream.ends[UP] is server:
                self.world.after(self._keepalive_ns + self.world.draw_ns(self._keepalive_ns), stream.give_up)

    def slow(self, one: Process, other: Process, duration_ns: int, factor: int) -> None:
        """Make every message between the two take `factor` times as long for a while."""
        until_ns = self.world.now_ns() + duration_ns
        self._slow[one, other] = self._slow[other, one] = (until_ns, factor)

    def heal(self) -> None:
        """End every partition and slowness."""
        self._blocked.clear()
        self._slow.clear()


def _ignore(_message: Any) -> None:
    """Take a message nobody waits for."""


def _nothing() -> None:
    """Do nothing at the end."""
