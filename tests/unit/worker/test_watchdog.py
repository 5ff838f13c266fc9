"""An engine that lives and makes no step is given up, whoever comes and goes; one that is waited for in vain is not."""

from __future__ import annotations

import itertools

from services.worker.core import messages as m
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from services.worker.core.watchdog import LOOKS

SIZES = Sizes(capacity_blocks=60, blocks_total=64, block_size=16, max_model_len=512)
STALL_NS = 300_000_000_000
LOOK_NS = STALL_NS // LOOKS
UP = (m.SchedulerReached(), m.SchedulerUp(5, 0), m.QueueReached(), m.QueueUp(10**18, 8))
REASON = "the engine has made no step for 300 s, with something in it"


class Bench:
    """A session that is woken as often as it asks to be, and what it has given up the engine for."""

    def __init__(self, stall_ns: int = STALL_NS) -> None:
        self.session = Session(SIZES, stall_ns)
        self.now_ns = 1
        self.given_up: list[str] = []
        self.names = (f"r{number}" for number in itertools.count(1))
        self.tell(*UP)

    def tell(self, *messages: m.Message) -> None:
        """Have a wake-up at this moment."""
        for message in (*messages, m.Tick()):
            for effect in self.session.step(message, self.now_ns):
                if isinstance(effect, m.GiveUpEngine):
                    self.given_up.append(effect.reason)

    def run(self) -> m.Lease:
        """Have another run in the engine."""
        lease = m.Lease(next(self.names), 1, 1)
        granted = m.Granted(lease.request_id, "batch", 4, True, 1)
        self.tell(granted, m.Delivered(lease, 1, 5, False), m.Tokenized(lease.run_id, 10))
        return lease

    def step(self) -> None:
        """Have the engine make a step."""
        self.tell(m.EngineReported(63, 1, 0, 0, 1, 0.1))

    def wait(self, passed_ns: int) -> None:
        """Let time pass, with the wake-ups that the session asks for."""
        until_ns = self.now_ns + passed_ns
        while (due_ns := self.session.due_ns(self.now_ns)) is not None and due_ns <= until_ns:
            self.now_ns = due_ns
            self.tell()
        self.now_ns = until_ns


def test_an_engine_that_makes_no_step_is_given_up_after_its_time() -> None:
    bench = Bench()
    bench.run()
    bench.wait(STALL_NS - 1)
    assert not bench.given_up
    bench.wait(1)
    assert bench.given_up == [REASON]


def test_steps_however_slow_keep_it() -> None:
    bench = Bench()
    bench.run()
    for _ in range(20):
        bench.wait(STALL_NS - LOOK_NS)
        bench.step()
    assert not bench.given_up
    bench.wait(STALL_NS)
    assert bench.given_up == [REASON], "the time is counted from the last step"


def test_an_engine_with_nothing_in_it_may_rest() -> None:
    bench = Bench()
    lease = bench.run()
    bench.step()
    bench.tell(m.EngineFinished(lease.run_id, 5, 0), m.Recorded(lease, True))
    bench.wait(10 * STALL_NS)
    bench.run()
    bench.tell()
    assert not bench.given_up


def test_runs_that_are_aborted_one_after_another_are_no_steps() -> None:
    """Each ends by its deadline, long before the engine is given up for it alone."""
    bench = Bench()
    for _ in range(2 * LOOKS):
        lease = bench.run()
        bench.wait(LOOK_NS)
        cancel = m.CancelRun(lease, m.CancelCause.DEADLINE)
        bench.tell(cancel, m.EngineAborted(lease.run_id, 0, 0), m.Recorded(lease, True))
        bench.wait(7 * LOOK_NS)
    assert bench.given_up == [REASON] * 2


def test_the_time_for_which_the_worker_itself_was_stopped_is_one_look() -> None:
    bench = Bench()
    bench.run()
    for _ in range(LOOKS - 1):
        bench.now_ns += 100 * STALL_NS
        bench.tell()
        assert not bench.given_up
    bench.now_ns += 100 * STALL_NS
    bench.step()
    bench.wait(STALL_NS - 1)
    assert not bench.given_up


def test_without_a_time_it_is_waited_for_for_ever() -> None:
    bench = Bench(0)
    bench.run()
    assert bench.session.due_ns(bench.now_ns) == bench.session._peers.renew_due_ns
    bench.now_ns += 1_000 * STALL_NS
    bench.tell()
    assert not bench.given_up
