"""Replays the transcripts beside this file: input lines, and indented below each the effects it must have.

A line without indent is an input (or a question: `ledger`, `channel`, `counts`); lines starting with # are comments.
`w1#2` is worker w1 in epoch 2; `drain=3` is the third that it has heard, the odd ones ask it
to drain. Blocks hold one token, so `announce r1 batch 5` books 5 blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.core.drain import Drain
from services.scheduler.core import messages as m
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.machine import Machine
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import SECOND_NS, announced, shape

FILES = sorted(Path(__file__).parent.glob("*.txt"))
ANNOUNCE_NUMBERS = {"attempt", "priority", "position", "n", "max_tokens", "prompt_tokens"}
PLAIN = {
    m.Opened: "opened",
    m.NameTaken: "name taken",
    m.EndStream: "end",
    m.Recall: "recall",
}
"""Effects that are written as a word and their fields."""


class Replay:
    """One machine, told what the transcript says."""

    def __init__(self) -> None:
        self.now_ns = 100 * SECOND_NS
        self.policy = "virtual-channels"
        self.shares: dict[str, Share] = {"interactive": Share(4.0, 0.1), "batch": Share(1.0)}
        self.standing_ns = 0
        self.machine = self.fresh_machine(started_ns=0)
        self.epochs: dict[str, int] = {}
        self.epoch = 0
        self.position = 0

    def fresh_machine(self, started_ns: int) -> Machine:
        machine = Machine(POLICIES[self.policy], self.shares, 5 * SECOND_NS, started_ns, standing_ns=self.standing_ns)
        machine.step(m.Tick(), self.now_ns)
        return machine

    def line(self, text: str) -> list[str]:
        """Carry out one input line and return what it caused."""
        verb, *words = text.split()
        plain = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        handler: Callable[[list[str], dict[str, str]], list[str]] = getattr(self, f"do_{verb}")
        return handler(plain, options)

    def tell(self, message: m.Input) -> list[str]:
        effects = self.machine.step(message, self.now_ns) + self.machine.arbitrate(self.now_ns)
        return [self.shown(effect) for effect in effects]

    def do_policy(self, words: list[str], _options: dict[str, str]) -> list[str]:
        self.policy = words[0]
        self.machine = self.fresh_machine(started_ns=0)
        return []

    def do_standing(self, words: list[str], _options: dict[str, str]) -> list[str]:
        self.standing_ns = int(words[0].removesuffix("ms")) * 1_000_000
        self.machine = self.fresh_machine(started_ns=0)
        return []

    def do_channels(self, _words: list[str], options: dict[str, str]) -> list[str]:
        self.shares = {}
        for name, value in options.items():
            weight, guaranteed, ceiling, *tier = value.split("/")
            self.shares[name] = Share(float(weight), float(guaranteed), float(ceiling), int(*tier))
        self.machine = self.fresh_machine(started_ns=0)
        return []

    def do_restart(self, _words: list[str], _options: dict[str, str]) -> list[str]:
        self.machine = self.fresh_machine(started_ns=self.now_ns)
        return []

    def do_queue(self, words: list[str], _options: dict[str, str]) -> list[str]:
        return self.tell(m.QueueOpened(tuple(self.shares)) if words[0] == "up" else m.QueueClosed())

    def do_open(self, words: list[str], options: dict[str, str]) -> list[str]:
        self.epoch += 1
        self.epochs[words[0]] = self.epoch
        engine = shape(int(options.get("capacity", "10")), int(options.get("seqs", "20")))
        holds = [item.split(":") for item in options.get("holds", "").split(",") if item]
        inventory = tuple(m.Holding(name, channel, int(blocks), int(seq)) for name, channel, blocks, seq in holds)
        models = tuple(options.get("models", "m").split(","))
        instance = options.get("instance", "i1")
        takes_standing = "standing" in options
        opened = m.WorkerOpened(self.epoch, words[0], instance, models, engine, inventory, takes_standing)
        heard = int(options.get("drain", "0"))
        return self.tell(opened.replace(drain=Drain(heard, heard % 2 == 1), leaving="leaving" in options))

    def do_close(self, words: list[str], _options: dict[str, str]) -> list[str]:
        return self.tell(m.WorkerClosed(self.epochs[words[0]]))

    def do_announce(self, words: list[str], options: dict[str, str]) -> list[str]:
        self.position += 1
        fields: dict[str, Any] = {
            key: int(value) if key in ANNOUNCE_NUMBERS else value for key, value in options.items()
        }
        return self.tell(announced(words[0], words[1], int(words[2]), self.position).replace(**fields))

    def do_gone(self, words: list[str], _options: dict[str, str]) -> list[str]:
        return self.tell(m.Gone(words[0], m.GoneReason[words[1].upper()]))

    def do_settle(self, words: list[str], options: dict[str, str]) -> list[str]:
        stream = self.epochs[words[0]]
        epoch = int(options.get("epoch", stream))
        told = (int(options.get(name, "0")) for name in ("prompt", "generated", "limit"))
        return self.tell(m.TokenizerAck(stream, epoch, words[1], int(options["seq"]), int(options["held"]), *told))

    def do_used(self, words: list[str], options: dict[str, str]) -> list[str]:
        worker, grant, name, channel, blocks = words
        self.position += 1
        stream = self.epochs[worker]
        request = announced(name, channel, int(blocks), self.position)
        return self.tell(m.GrantUsed(stream, int(options.get("epoch", stream)), grant, request))

    def do_release(self, words: list[str], options: dict[str, str]) -> list[str]:
        stream = self.epochs[words[0]]
        cause = m.ReleaseCause[words[2].upper()]
        epoch = int(options.get("epoch", stream))
        tokens = int(options.get("output", "0"))
        return self.tell(m.CompletionAck(stream, epoch, words[1], int(options["seq"]), cause, tokens))

    def do_report(self, words: list[str], options: dict[str, str]) -> list[str]:
        epoch = self.epochs[words[0]]
        free = int(options["free"]) if "free" in options else None
        running, waiting, preemptions = (int(options.get(n, "0")) for n in ("running", "waiting", "preemptions"))
        usage, shared = float(options.get("usage", "0")), int(options.get("shared", "0"))
        report = m.EngineReport(epoch, epoch, free, running, waiting, preemptions, 0, usage, blocks_shared=shared)
        return self.tell(report)

    def do_drain(self, words: list[str], _options: dict[str, str]) -> list[str]:
        return self.tell(m.DrainRequested(words[0]))

    def do_undrain(self, words: list[str], _options: dict[str, str]) -> list[str]:
        return self.tell(m.DrainRequested(words[0], undo=True))

    def do_leaving(self, words: list[str], _options: dict[str, str]) -> list[str]:
        return self.tell(m.WorkerLeaving(self.epochs[words[0]], "told to stop"))

    def do_after(self, words: list[str], _options: dict[str, str]) -> list[str]:
        self.now_ns += int(words[0].removesuffix("ms")) * 1_000_000
        return self.tell(m.Tick())

    def do_ledger(self, words: list[str], _options: dict[str, str]) -> list[str]:
        worker = self.machine.fleet.named(words[0])
        if worker is None:
            return ["no such worker"]
        held = [f"{channel}:{blocks}" for channel, blocks in sorted(worker.ledger.held_by_channel().items())]
        beyond = f" overcommitted {worker.ledger.overcommitted_blocks}" * bool(worker.ledger.overcommitted_blocks)
        drift = f" drift {worker.drift_blocks}" * bool(worker.drift_blocks)
        shared = f" shared {worker.ledger.shared_blocks}" * bool(worker.ledger.shared_blocks)
        return [f"free {worker.ledger.free_blocks} usable {worker.usable_blocks} held {held}{beyond}{drift}{shared}"]

    def do_channel(self, words: list[str], _options: dict[str, str]) -> list[str]:
        return [f"waiting {self.machine.backlog.waiting[words[0]]}"]

    def do_counts(self, _words: list[str], _options: dict[str, str]) -> list[str]:
        counters = self.machine.counters
        kinds = {"stale": counters.stale, "duplicate": counters.duplicates, "unknown": counters.unknown}
        lines = [f"{kind} {name} {n}" for kind, by_name in kinds.items() for name, n in sorted(by_name.items())]
        return [*lines, *([f"refused settles {counters.refused_settles}"] if counters.refused_settles else [])]

    def shown(self, effect: m.Effect) -> str:
        """Return an effect as the transcripts write it."""
        match effect:
            case m.Grant():
                settles = " settles" if effect.settles else ""
                target = f"{effect.worker_id}#{effect.epoch}"
                text = f"grant {target} {effect.request_id} {effect.channel} {effect.booked_blocks}{settles}"
                text += f" ahead {effect.reserve_output_tokens}" * bool(effect.reserve_output_tokens)
                if effect.standing is not None:
                    text += f" for {effect.standing.prompt_tokens}+{effect.standing.max_tokens}"
            case m.Met():
                text = f"met {effect.worker_id}#{effect.epoch} {effect.request.request_id} {effect.booked_blocks}"
            case m.SetWindow():
                text = " ".join([f"window {effect.channel} {effect.limit}", *(name or "any" for name in effect.served)])
            case m.RejectRequest():
                text = f"reject {effect.request_id} {effect.code}: {effect.message}"
            case m.Settled():
                text = f"settled {effect.request_id} {effect.held_blocks}, {effect.refunded_blocks} home"
            case m.Released():
                cause = effect.cause.name.lower() if effect.cause else "epoch end"
                text = f"released {effect.request_id} {cause}, {effect.released_blocks} home"
            case m.TellDrain():
                text = f"drain #{effect.epoch} {'yes' if effect.drain.wanted else 'no'}, version {effect.drain.version}"
            case m.AuditFailed():
                text = f"audit failed: {effect.violations}"
            case _:
                name = PLAIN[type(effect)]
                text = " ".join([name, f"#{effect.epoch}", *effect[1:]])
        return text


def replay(text: str) -> str:
    """Return the transcript as it really goes: comments and inputs kept, effects recomputed."""
    world = Replay()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"  {effect}" for effect in world.line(line)]
    for worker in world.machine.fleet:
        assert worker.ledger.audit() == []
    return "\n".join(lines) + "\n"


def test_there_are_transcripts() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    assert replay(path.read_text()) == path.read_text()
