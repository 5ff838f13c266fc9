"""A scheduler machine with a hand on every wire: open workers, announce, finish, and see what is granted.

Blocks hold one token here, so a request of `blocks` prompt tokens and one output token books exactly `blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.scheduler.core import messages as m
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.fleet import Worker
from services.scheduler.core.machine import Machine
from services.scheduler.core.sharing.share import Share

SECOND_NS = 1_000_000_000
WINDOW_TOKENS = 10_000


def shape(capacity_blocks: int = 100, max_num_seqs: int = 10_000) -> m.EngineShape:
    """Return an engine shape with blocks of one token."""
    return m.EngineShape(capacity_blocks, 1, WINDOW_TOKENS, max_num_seqs)


def announced(request_id: str, channel: str, blocks: int, position: int = 0, **changes: object) -> m.Announced:
    """Return a request that books `blocks` and settles to the same."""
    fields: dict[str, object] = {
        "request_id": request_id,
        "channel": channel,
        "priority": 0,
        "position": position,
        "attempt": 1,
        "model": "",
        "prompt_bytes": 0,
        "prompt_tokens": blocks,
        "max_tokens": 1,
        "n": 1,
        "chat": False,
    }
    return m.Announced(**{**fields, **changes})  # type: ignore[arg-type]


class Rig:
    """A machine with a queue connected, its clock, and everything it has granted."""

    def __init__(
        self,
        shares: Mapping[str, Share],
        policy: str = "virtual-channels",
        sequence_slack: float = 1.0,
        connected: bool = True,
        standing_ns: int = 0,
    ) -> None:
        """Start with the fleet known and no worker."""
        self.now_ns = SECOND_NS
        self.machine = Machine(POLICIES[policy], shares, 5 * SECOND_NS, 0, sequence_slack, standing_ns)
        self.grants: list[m.Grant] = []
        self.effects: list[m.Effect] = []
        self.position = 0
        self._epoch = 0
        self._seq = 0
        if connected:
            self.now_ns = 10 * SECOND_NS
            self.tell(m.Tick(), m.QueueOpened(tuple(shares)))

    def tell(self, *messages: m.Input) -> list[m.Effect]:
        """Feed messages as one wake-up, arbitrate, and return all effects."""
        effects: list[m.Effect] = []
        for message in messages:
            effects += self.machine.step(message, self.now_ns)
        effects += self.machine.arbitrate(self.now_ns)
        self.grants += [effect for effect in effects if isinstance(effect, m.Grant)]
        self.effects += effects
        return effects

    def open(
        self,
        worker_id: str,
        engine: m.EngineShape | None = None,
        inventory: Iterable[m.Holding] = (),
        model: str = "m",
        takes_standing: bool = False,
        aliases: tuple[str, ...] = (),
        guaranteed_first: bool = False,
    ) -> int:
        """Open a new epoch of a worker and return it."""
        self._epoch += 1
        opened = m.WorkerOpened(
            self._epoch,
            worker_id,
            "i",
            (model, *aliases),
            engine or shape(),
            tuple(inventory),
            takes_standing,
            guaranteed_first,
        )
        self.tell(opened)
        return self._epoch

    def announce(self, channel: str, *sizes: int, **changes: object) -> list[str]:
        """Announce one request of each size in one wake-up; return their names."""
        names = []
        requests = []
        for blocks in sizes:
            self.position += 1
            names.append(f"{channel}-{self.position}")
            requests.append(announced(names[-1], channel, blocks, self.position, **changes))
        self.tell(*requests)
        return names

    def settle(self, grant: m.Grant, held_blocks: int) -> None:
        """The worker's tokenizer ACK."""
        self._seq += 1
        self.tell(m.TokenizerAck(grant.epoch, grant.epoch, grant.request_id, self._seq, held_blocks))

    def release(self, grant: m.Grant, cause: m.ReleaseCause = m.ReleaseCause.COMPLETED) -> None:
        """The worker's completion ACK."""
        self._seq += 1
        self.tell(m.CompletionAck(grant.epoch, grant.epoch, grant.request_id, self._seq, cause))

    def finish(self, grant: m.Grant) -> None:
        """The request was claimed and has run to its end."""
        self.tell(m.Gone(grant.request_id, m.GoneReason.CLAIMED))
        self.release(grant)

    def wait(self, milliseconds: int) -> None:
        """Let time pass."""
        self.now_ns += milliseconds * 1_000_000

    def worker(self, worker_id: str) -> Worker:
        """Return the present life of a worker."""
        worker = self.machine.fleet.named(worker_id)
        assert worker is not None
        return worker

    @property
    def granted(self) -> list[str]:
        """Names of the requests granted so far, in order."""
        return [grant.request_id for grant in self.grants]

    def check(self) -> None:
        """Assert the conservation law for every worker."""
        for worker in self.machine.fleet:
            assert worker.ledger.audit() == []
