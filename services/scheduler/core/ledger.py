"""The credit ledger of one worker epoch.

A credit is the right to occupy one KV-cache block. Every credit of a worker is
in exactly one place: free, or held by one named reservation. The law that every
operation keeps, and `audit` recomputes from scratch, is

    free + sum(held) == capacity + overcommitted

`overcommitted` is zero unless a worker came back with more blocks in use than it
now has (it was restarted with other settings while its scheduler was away, say),
or running requests grew beyond what was free under a policy that lets them, or
the policy books ahead, or a request within a guarantee was booked whose engine makes
room for it. Such blocks exist in no pool, so they are named for what
they are instead of letting `free` go below zero, and `free` and `overcommitted`
are never both above zero. Any other booking may leave at most `ahead_blocks` of them
behind: credits for a round trip, spent on blocks that are free in the engine by
the time their request gets there (0 unless the policy says otherwise: nothing
is booked until releases have paid everything off). Blocks that several requests
share by the prefix cache are held by the reservation of each, and taken once:
`shared_blocks` of them may be left behind as well, as long as the engine says so.

Operations check first and change afterwards: one that is refused leaves the
ledger as it was. ACKs carry absolute values and a sequence number that grows
with every ACK of a request; the highest one wins, so a lost, repeated or
reordered ACK can neither mint a credit nor lose one.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from services.core.value import Value
from services.scheduler.core.messages import Holding

RELEASES_REMEMBERED = 512
"""Released names kept to tell a late ACK from an unknown one, and from one of a second booking: what a worker ends in a
second or more. Its stream keeps their order, so that only one said twice comes late, and soon or never. They take
0.12 MB for each worker."""


class Reservation:
    """The credits booked for one request: `booked` at the grant, `held` now."""

    __slots__ = ("booked_blocks", "channel", "guaranteed", "held_blocks", "last_attempt", "seq", "sequences", "settled")

    def __init__(
        self,
        channel: str,
        booked_blocks: int,
        sequences: int,
        seq: int,
        guaranteed: bool = False,
        last_attempt: bool = False,
    ) -> None:
        """Begin with nothing held; `seq` is that of the last ACK under this name."""
        self.guaranteed = guaranteed
        """Whether its engine was told to run it before what is not guaranteed."""
        self.last_attempt = last_attempt
        """Whether it is to share the worker with no other such."""
        self.channel = channel
        self.booked_blocks = booked_blocks
        self.held_blocks = 0
        self.sequences = sequences
        self.seq = seq
        self.settled = False


class Verdict(enum.Enum):
    """What became of an ACK. Only APPLIED changed anything."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    LATE = "late"
    UNKNOWN = "unknown"
    NO_ROOM = "no_room"


class Change(Value):
    """Outcome of an ACK: blocks that came home (negative: blocks taken by a reservation that grew)."""

    def __init__(self, verdict: Verdict, refunded_blocks: int = 0) -> None:
        self.verdict, self.refunded_blocks = verdict, refunded_blocks


class Ledger:
    """Free and held credits of one worker, by reservation and by channel. One owner; not shared."""

    def __init__(self, capacity_blocks: int, ahead_blocks: int = 0) -> None:
        """Start with all of `capacity_blocks` free, `ahead_blocks` more to be booked while others are held.

        Raises ValueError for a capacity below 1 and for less than nothing ahead.
        """
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
        if ahead_blocks < 0:
            raise ValueError(f"ahead_blocks must not be negative, got {ahead_blocks}")
        self.capacity_blocks = capacity_blocks
        self.ahead_blocks = ahead_blocks
        self.free_blocks = capacity_blocks
        self.overcommitted_blocks = 0
        self.shared_blocks = 0
        """Blocks of reservations that the engine has only once, and which others hold too."""
        self.sequences = 0
        self.last_attempts = 0
        """Reservations of requests on their last attempt: one at most, but for what a worker brings along."""
        self._reservations: dict[str, Reservation] = {}
        self._held_by_channel: dict[str, int] = {}
        self._sequences_by_channel: dict[str, int] = {}
        # Its oldest name is found at once. A dict looks through the places of all that were deleted before it.
        self._last_seqs: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of reservations."""
        return len(self._reservations)

    def __contains__(self, request_id: str) -> bool:
        """Return whether the request has a reservation."""
        return request_id in self._reservations

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the requests that hold credits."""
        return iter(self._reservations)

    def reservation(self, request_id: str) -> Reservation | None:
        """Return the request's reservation, to be read and not changed, or None."""
        return self._reservations.get(request_id)

    @property
    def held_blocks(self) -> int:
        """Blocks held by all reservations."""
        return self.capacity_blocks + self.overcommitted_blocks - self.free_blocks

    @property
    def bookable_blocks(self) -> int:
        """Blocks that the next booking may take: what is free and what may be booked ahead of it, never above all."""
        return max(min(self.balance_blocks + self.ahead_blocks, self.capacity_blocks), 0)

    @property
    def balance_blocks(self) -> int:
        """Blocks that nobody has taken, those held together counted once; negative where more are held than exist."""
        return self.free_blocks - self.overcommitted_blocks + min(self.shared_blocks, self.held_blocks)

    def held_by(self, channel: str) -> int:
        """Return the blocks held by the channel's reservations."""
        return self._held_by_channel.get(channel, 0)

    def sequences_of(self, channel: str) -> int:
        """Return the completions that the channel's reservations are for."""
        return self._sequences_by_channel.get(channel, 0)

    def held_by_channel(self) -> dict[str, int]:
        """Return a copy of the blocks held per channel, channels that hold none left out."""
        return {channel: blocks for channel, blocks in self._held_by_channel.items() if blocks}

    def reservations_by_channel(self) -> Counter[str]:
        """Return the number of reservations per channel."""
        found: dict[str, int] = {}
        for reservation in self._reservations.values():
            found[reservation.channel] = found.get(reservation.channel, 0) + 1
        return Counter(found)

    # ---- operations ----

    def book(
        self,
        request_id: str,
        channel: str,
        blocks: int,
        sequences: int = 1,
        guaranteed: bool = False,
        may_overcommit: bool = False,
        last_attempt: bool = False,
    ) -> bool:
        """Book `blocks` for the request; False, changing nothing, if they are not bookable or it has a reservation.

        One that `may_overcommit` needs no bookable blocks: its engine takes them from others.

        Raises ValueError for fewer than one block.
        """
        if blocks < 1:
            raise ValueError(f"a booking takes at least 1 block, got {blocks} for {request_id}")
        if request_id in self._reservations or (blocks > self.bookable_blocks and not may_overcommit):
            return False
        # A second booking of one name goes on where the first one's sequence ended, so that no ACK of the first counts.
        seq = self._last_seqs.pop(request_id, 0)
        reservation = Reservation(channel, blocks, sequences, seq, guaranteed, last_attempt)
        self._reservations[request_id] = reservation
        self._count(reservation)
        self._move(reservation, blocks)
        return True

    def settle(self, request_id: str, seq: int, held_blocks: int, may_overcommit: bool = False) -> Change:
        """Set what the request holds, as its tokenizer ACK says.

        Growth beyond what is free is refused, unless it `may_overcommit`: then it is of a request that runs, and
        refusing would not keep its engine from taking the block.
        """
        reservation = self._reservations.get(request_id)
        if reservation is None:
            return Change(self._why_absent(request_id))
        if seq <= reservation.seq:
            return Change(Verdict.DUPLICATE)
        growth = held_blocks - reservation.held_blocks
        if growth > self.free_blocks and growth > 0 and not may_overcommit:
            return Change(Verdict.NO_ROOM)
        reservation.seq = seq
        reservation.settled = True
        self._move(reservation, growth)
        return Change(Verdict.APPLIED, -growth)

    def rename(self, name: str, request_id: str) -> bool:
        """Give a reservation to the request it was made for before there was one.

        False, changing nothing, if there is no reservation of that name or the request has one.
        """
        reservation = self._reservations.get(name)
        if reservation is None or request_id in self._reservations:
            return False
        self._reservations[request_id] = self._reservations.pop(name)
        reservation.seq = max(self._last_seqs.pop(request_id, 0), reservation.seq)
        return True

    def release(self, request_id: str, seq: int) -> Change:
        """End the reservation: everything it still holds comes home."""
        reservation = self._reservations.get(request_id)
        if reservation is None:
            return Change(self._why_absent(request_id))
        if seq <= reservation.seq:
            return Change(Verdict.DUPLICATE)
        refund = reservation.held_blocks
        self._remove(request_id, reservation)
        self._remember(request_id, seq)
        return Change(Verdict.APPLIED, refund)

    def adopt(self, inventory: Iterable[Holding]) -> None:
        """Take over what a worker says it holds, also beyond the capacity; names already known are left alone."""
        for holding in inventory:
            if holding.request_id in self._reservations:
                continue
            reservation = Reservation(
                holding.channel,
                holding.held_blocks,
                holding.completions,
                holding.seq,
                holding.guaranteed,
                holding.last_attempt,
            )
            self._reservations[holding.request_id] = reservation
            self._count(reservation)
            self._move(reservation, holding.held_blocks)

    def drop(self) -> dict[str, int]:
        """End every reservation, because the epoch is over; return the blocks that came home by request."""
        refunds = {request_id: reservation.held_blocks for request_id, reservation in self._reservations.items()}
        for request_id, reservation in list(self._reservations.items()):
            self._remove(request_id, reservation)
        return refunds

    # ---- the law ----

    def audit(self) -> list[str]:
        """Recompute every total from the reservations; return one sentence per violation, none if all is well."""
        held: dict[str, int] = {}
        sequences: dict[str, int] = {}
        for reservation in self._reservations.values():
            channel = reservation.channel
            held[channel] = held.get(channel, 0) + reservation.held_blocks
            sequences[channel] = sequences.get(channel, 0) + reservation.sequences
        total = sum(held.values())
        violations = []
        if self.free_blocks + total != self.capacity_blocks + self.overcommitted_blocks:
            violations.append(
                f"free {self.free_blocks} + held {total} != capacity {self.capacity_blocks}"
                f" + overcommitted {self.overcommitted_blocks}"
            )
        if min(self.free_blocks, self.overcommitted_blocks) != 0:
            violations.append(
                f"free {self.free_blocks}, overcommitted {self.overcommitted_blocks}: the lesser must be 0"
            )
        if self.held_by_channel() != {channel: blocks for channel, blocks in held.items() if blocks}:
            violations.append(f"per-channel totals {self.held_by_channel()} differ from the reservations {held}")
        if sum(sequences.values()) != self.sequences:
            violations.append(f"sequences {self.sequences} differ from the reservations' {sum(sequences.values())}")
        if sequences != self._sequences_by_channel:
            violations.append(f"sequences {self._sequences_by_channel} differ from the reservations' {sequences}")
        last_attempts = sum(reservation.last_attempt for reservation in self._reservations.values())
        if last_attempts != self.last_attempts:
            violations.append(f"{self.last_attempts} last attempts differ from the reservations' {last_attempts}")
        return violations

    # ---- the only places where blocks change hands ----

    def _move(self, reservation: Reservation, blocks: int) -> None:
        """Move `blocks` from free to the reservation; a negative number moves them back."""
        held_before = self.held_blocks
        reservation.held_blocks += blocks
        self._held_by_channel[reservation.channel] = self._held_by_channel.get(reservation.channel, 0) + blocks
        balance = self.free_blocks - self.overcommitted_blocks - blocks
        self.free_blocks = max(balance, 0)
        self.overcommitted_blocks = max(-balance, 0)
        assert self.held_blocks == held_before + blocks, "credits were minted or lost"

    def _remove(self, request_id: str, reservation: Reservation) -> None:
        channel = reservation.channel
        self._move(reservation, -reservation.held_blocks)
        self.sequences -= reservation.sequences
        self.last_attempts -= reservation.last_attempt
        del self._reservations[request_id]
        if self._held_by_channel[channel] == 0:
            del self._held_by_channel[channel]
        left = self._sequences_by_channel.pop(channel) - reservation.sequences
        if left:
            self._sequences_by_channel[channel] = left

    def _count(self, reservation: Reservation) -> None:
        self.sequences += reservation.sequences
        self.last_attempts += reservation.last_attempt
        by_channel = self._sequences_by_channel
        by_channel[reservation.channel] = by_channel.get(reservation.channel, 0) + reservation.sequences

    def _remember(self, request_id: str, seq: int) -> None:
        self._last_seqs[request_id] = seq
        if len(self._last_seqs) > RELEASES_REMEMBERED:
            self._last_seqs.popitem(last=False)

    def _why_absent(self, request_id: str) -> Verdict:
        return Verdict.LATE if request_id in self._last_seqs else Verdict.UNKNOWN
