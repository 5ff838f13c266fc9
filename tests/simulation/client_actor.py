"""A client: submits under its keys until it is acknowledged, watches from its cursor, reads, deletes, requeues.

Its disk keeps what a batch runner's journal keeps: the cursor, what has been read, and what is to be deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.request.v1 import request_pb2
from services.queue.admin import delete_item
from services.queue.core.entry import DEFAULT_TENANT, RequestMeta, parse_request_id
from services.queue.core.lifecycle import Outcome
from services.queue.core.messages import Cancel, Inspect, NewRequest, RequeueDead
from services.queue.storage import store
from services.queue.submits.intake import submit_item
from tests.simulation.durable import STORE_ID
from tests.simulation.network import DOWN, Network, Stream
from tests.simulation.plan import Plan, Wanted
from tests.simulation.queue_actor import QueueActor
from tests.simulation.world import MS, Process, World, demand

RETRY_NS = 200 * MS
LOOK_NS = 150 * MS
RECONNECT_NS = 40 * MS
RESTART_NS = 100 * MS
MOST_REVIVALS = 1
"""Times a client brings one dead letter back."""


class Read:
    """What a client has read of one request, on its disk."""

    def __init__(self) -> None:
        """Have read nothing yet."""
        self.outcomes: list[Outcome] = []
        self.revivals = 0
        self.names: list[str] = []
        """Under which names; a second one only if a late copy of the submit came after the delete."""
        self.to_delete: list[str] = []
        self.deleted: list[str] = []


class ClientActor(Process):
    """Works through its requests, whatever happens to it or to the queue."""

    def __init__(self, world: World, net: Network, number: int, plan: Plan, queue: QueueActor) -> None:
        """Call `queue` once started."""
        super().__init__(world, f"c{number}")
        self.net, self.queue = net, queue
        self.batch = f"batch-{number}"
        self.wanted = {wanted.key: wanted for wanted in plan.requests if wanted.client == number}
        self._by_number = {wanted.number: wanted for wanted in self.wanted.values()}
        self._metas: dict[str, RequestMeta] = {}
        self._tokens = plan.options.seed % 2 == 0
        self._began_ns = world.now_ns()
        # ---- on its disk ----
        self.cursor = 0
        self.read: dict[str, Read] = {}
        # ---- in its memory ----
        self._acked: dict[str, str] = {}
        self._calls: Stream | None = None
        self._watch: Stream | None = None
        self._asked = 0

    @property
    def done(self) -> bool:
        """Whether every outcome has been read, and what was to be deleted is."""
        return len(self.read) == len(self.wanted) and all(
            not read.to_delete and (read.outcomes[-1] is not Outcome.DEAD or not self._revives(key, read))
            for key, read in self.read.items()
        )

    def _revives(self, key: str, read: Read) -> bool:
        # What a late copy of the submit became is deleted, dead or not.
        return self.wanted[key].requeue and len(read.names) == 1 and read.revivals < MOST_REVIVALS

    # ---- life ----

    def boot(self) -> None:
        """Go on from what the disk says."""
        self._call_up()
        self._watch_on()
        self._look()
        for wanted in self.wanted.values():
            read = self.read.get(wanted.key)
            if read is None:
                self.timer(max(self._began_ns + wanted.at_ns - self.world.now_ns(), 0), self._submit, wanted)
            else:
                self._finish(wanted.key, read)

    def died(self) -> None:
        """Keep what is on disk."""
        self._acked.clear()
        self._calls = self._watch = None

    def crash(self, kept: bool) -> None:
        """kill -9; `kept` if what it had sent still arrives."""
        self.net.kill(self, kept)
        self.stop(RESTART_NS)

    def _look(self) -> None:
        """Ask now and then where everything is that was acknowledged and not answered yet."""
        names = tuple(name for key, name in self._acked.items() if key not in self.read)
        if names:
            self.call(("look", names), lambda ticket: Inspect(ticket, names))
        self.timer(LOOK_NS, self._look)

    # ---- calls ----

    def _call_up(self) -> None:
        stream = self.net.connect(self, self.queue)
        if stream is None:
            self.timer(self.world.draw_ns(RECONNECT_NS), self._call_up)
            return
        self.queue.accept_calls(stream)
        self._calls = stream
        stream.hear[DOWN] = lambda answer: self.post(self._answered, *answer)
        stream.over[DOWN] = lambda: self.post(self._hung_up, stream)

    def _hung_up(self, stream: Stream) -> None:
        if stream is self._calls:
            self._calls = None
            self.timer(self.world.draw_ns(RECONNECT_NS), self._call_up)

    def call(self, name: tuple[str, Any], make: Callable[[int], Any]) -> None:
        """Send one call, if there is a stream; whoever calls tries again until the answer is there."""
        if self._calls is not None:
            self._calls.up((name, make))

    def _answered(self, name: tuple[str, Any], told: Any) -> None:
        kind, subject = name
        if told is None:
            return
        if kind == "look":
            for request_id, view in zip(subject, told.views, strict=True):
                demand(view or self.queue.durable.ended(request_id), f"the queue denies that it has {request_id}")
        if kind == "submit":
            self._take_ack(self._by_number[subject], told.acks[0][0])
        elif kind == "delete":
            key, request_id = subject
            read = self.read[key]
            if request_id in read.to_delete:
                read.to_delete.remove(request_id)
                read.deleted.append(request_id)

    # ---- submits ----

    def _meta(self, wanted: Wanted) -> RequestMeta:
        """Return the request's metadata, the same for each try."""
        meta = self._metas.get(wanted.key)
        if meta is None:
            deadline_ns = self.world.now_ns() + wanted.deadline_ns if wanted.deadline_ns else 0
            meta = self._metas[wanted.key] = RequestMeta(
                tenant=DEFAULT_TENANT, idempotency_key=wanted.key, channel=wanted.channel, model="", batch=self.batch,
                priority=wanted.priority, deadline_ns=deadline_ns, traceparent="",
                client_reference=str(wanted.prompt_tokens),
                prompt_bytes=4 * wanted.prompt_tokens if wanted.told == "bytes" else 0,
                prompt_tokens=wanted.prompt_tokens if wanted.told == "tokens" else 0,
                max_tokens=wanted.max_tokens, n=wanted.completions, chat=False, prefix_digest=0,
            )  # fmt: skip
        return meta

    def _submit(self, wanted: Wanted) -> None:
        if wanted.key in self._acked or wanted.key in self.read:
            return
        new = NewRequest(self._meta(wanted), b"payload")
        for _ in range(2 if wanted.repeat else 1):
            self.call(("submit", wanted.number), lambda ticket: submit_item(ticket, (new,)))
        self.timer(RETRY_NS, self._submit, wanted)

    def _take_ack(self, wanted: Wanted, request_id: str) -> None:
        if wanted.key in self.read:
            return  # of a copy that came after the outcome
        known = self._acked.get(wanted.key)
        demand(known in {None, request_id}, f"{wanted.key} is acknowledged as {known} and as {request_id}")
        if known is None:
            self._acked[wanted.key] = request_id
            demand(self.queue.durable.exists(request_id), f"{request_id} was acknowledged and is not on disk")
            if wanted.cancel_ns:
                self.timer(wanted.cancel_ns, self.cancel, (request_id,))

    def cancel(self, request_ids: tuple[str, ...] | None) -> None:
        """Cancel requests, or the whole batch, once and without waiting for an answer."""
        batch = (DEFAULT_TENANT, "" if request_ids is not None else self.batch)
        self.call(("cancel", None), lambda ticket: Cancel(ticket, request_ids, batch))

    def requeue_all(self) -> None:
        """Bring back every dead letter of the store, as an operator may."""
        self.call(("requeue", None), lambda ticket: RequeueDead(ticket, None))

    # ---- outcomes ----

    def _watch_on(self) -> None:
        stream = self.net.connect(self, self.queue)
        if stream is None:
            self.timer(self.world.draw_ns(RECONNECT_NS), self._watch_on)
            return
        self.queue.accept_watch(stream)
        self._watch = stream
        stream.hear[DOWN] = lambda page: self.post(self._take_page, stream, page)
        stream.over[DOWN] = lambda: self.post(self._watch_lost, stream)
        stream.up((self.batch, self.cursor, self._tokens))

    def _watch_lost(self, stream: Stream) -> None:
        if stream is self._watch:
            self._watch = None
            self.timer(self.world.draw_ns(RECONNECT_NS), self._watch_on)

    def _take_page(self, stream: Stream, page: Sequence[tuple[int, request_pb2.Result]]) -> None:
        if stream is not self._watch:
            return
        for cursor, result in page:
            demand(cursor > self.cursor, f"{self.name} was told of position {cursor} after {self.cursor}")
            self.cursor = cursor
            self._take_result(result)
        stream.up(None)

    def _take_result(self, result: request_pb2.Result) -> None:
        key = result.idempotency_key
        read = self.read.setdefault(key, Read())
        outcome = Outcome(result.outcome)
        again = result.request_id in read.names
        demand(not again or read.outcomes[-1] is Outcome.DEAD, f"{key} was answered twice: {read.outcomes}, {outcome}")
        if again:
            read.revivals += 1
        else:
            demand(
                not read.names or read.deleted or read.to_delete, f"{key} names {read.names} and {result.request_id}"
            )
            read.names.append(result.request_id)
        self.world.note(self.name, "reads", key, outcome.name)
        read.outcomes.append(outcome)
        if len(read.names) > 1:
            self._erase(key, read, result.request_id)
        else:
            self._finish(key, read)

    def _finish(self, key: str, read: Read) -> None:
        """Do what is to be done with a request whose outcome has been read."""
        if read.outcomes[-1] is Outcome.DEAD and self._revives(key, read):
            self._requeue(key, read, len(read.outcomes))
        elif self.wanted[key].delete and not read.to_delete and not read.deleted:
            self._erase(key, read, read.names[0])
        else:
            for request_id in read.to_delete:
                self._delete(key, request_id)

    def _requeue(self, key: str, read: Read, outcomes: int) -> None:
        """Ask until the next outcome is there."""
        if len(read.outcomes) == outcomes and self._revives(key, read):
            request_id = read.names[0]
            self.call(("requeue", None), lambda ticket: RequeueDead(ticket, (request_id,)))
            self.timer(RETRY_NS, self._requeue, key, read, outcomes)

    def _erase(self, key: str, read: Read, request_id: str) -> None:
        """Write down that the result is to be deleted, then have it deleted."""
        read.to_delete.append(request_id)
        self.queue.durable.has_read(request_id)
        self._delete(key, request_id)

    def _delete(self, key: str, request_id: str) -> None:
        if request_id in self.read[key].to_delete:
            seqs = (parse_request_id(STORE_ID, request_id),)
            self.call(("delete", (key, request_id)), partial(_delete_item_of, self.queue, seqs))
            self.timer(RETRY_NS, self._delete, key, request_id)


def _delete_item_of(queue: QueueActor, seqs: tuple[int, ...], ticket: int) -> Any:
    """Return the item of a delete as the queue's servicer makes it; raises StoreError."""
    rows, _, _ = store.durably(queue.store, partial(queue.reader._heads, seqs))
    return delete_item(ticket, rows)
