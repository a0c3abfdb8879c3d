"""Which keys a round of fan-out claims events from, how many of each key, and from which sequence on. No I/O.

To find out which keys have undelivered events takes as long as all the rest of a small round. So a round may guess the
keys (decision 13):

1. Events were just committed here: probably of the keys that had events last (``expected``).
2. Each of the last two rounds has found events: the next round will find some too, if the keys are few.
3. Fan-out reads behind a sequence (``behind``): all keys are claimed from, because a question which keys have events
   would start at the beginning of each key.

A round that guessed and found no events asks the server, and so does the round after a guess of kind 1. Guesses are
only made while no live handler is ordered: ordered keys must be claimed together, in a single view of the table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from outboxio.model.event import EventRecord
from outboxio.storage.protocols import FanoutRequest, FanoutResult
from outboxio.storage.share_out import Reach, share_out

# --- live subscriptions ----------------------------------------------------------------------------
#
# Live subscriptions, and the keys of fan-out (event types and topics) that live handlers want.


class Key(Struct, frozen=True):
    """An event type, or a topic, that a live handler wants."""

    sign: str
    """``#`` for a topic, nothing for an event type."""
    value: str
    is_ordered: bool
    """True if an ordered handler wants the key."""
    waits: bool
    """True if the key has undelivered events."""

    @property
    def name(self) -> str:
        """The key as :class:`FanoutRequest` and :class:`FanoutResult` name keys."""
        return f"{self.sign}{self.value}"


class LiveSubscription(Struct, frozen=True, array_like=True):
    """A handler that wants an event type or a topic, as ``SUBSCRIPTIONS`` in ``fanout.py`` reads subscriptions."""

    handler_name: str
    event_type: str
    topic: str
    priority: int
    ordered: int
    aliases: str
    seen: str
    partitions: int

    @property
    def key(self) -> tuple[str, str]:
        return ("#", self.topic) if self.topic else ("", self.event_type)


_live = msgspec.json.Decoder(list[LiveSubscription]).decode
strings = msgspec.json.Decoder(list[str]).decode


def subscribed(found: Iterable[tuple[str]]) -> Sequence[LiveSubscription]:
    """The live subscriptions that get new notifications: all but the subscriptions of an alias of a live handler.

    After a rename that was taken back, two names are aliases of each other: the name that was seen later counts.
    """
    live = _live(f"[{','.join([text for (text,) in found])}]")
    newest: dict[tuple[str, str], str] = {}
    for s in live:
        for alias in strings(s.aliases) if s.aliases != "[]" else ():
            newest[s.handler_name, alias] = max(s.seen, newest.get((s.handler_name, alias), ""))
    replaced = {
        alias for (name, alias), seen in newest.items() if (newest.get((alias, name), ""), alias) <= (seen, name)
    }
    return [s for s in live if s.handler_name not in replaced]


def keys_of(events: Iterable[EventRecord], subscriptions: Sequence[LiveSubscription]) -> dict[str, str]:
    """The ids of the events that a live handler wants, each with the name of the key; the event type goes first."""
    wanted = {s.key for s in subscriptions}
    keys: dict[str, str] = {}
    for event in events:
        if event.event_type is not None and ("", event.event_type) in wanted:
            keys[str(event.id)] = event.event_type
        elif event.topic is not None and ("#", event.topic) in wanted:
            keys[str(event.id)] = f"#{event.topic}"
    return keys


# --- the plan ----------------------------------------------------------------------------------------


MOST_GUESSED = 8  # keys that are claimed from without asking the server first
BUSY_AFTER = 2  # rounds in a row that have found events
MOST_AT_ONCE = 64  # keys in a claim: the planning of more branches takes longer than the reading of the rows
BYTES_OF_EVENT = 100  # that an event takes in a message, at most: the id, twice
SKIP_LOCKED_FOR = 60.0  # seconds that claims skip locked events, after a round has met a locked event


class Taken(Struct, frozen=True):
    """The events to take, of the events that a claim has found."""

    ids: Mapping[Key, Sequence[str]]
    """The ids to take, by key; no key without ids."""
    full: frozenset[str]
    """The names of the keys that probably have more events."""
    reached: Mapping[str, int]
    """The highest sequence that was found, by the name of the key."""


class Claim(Struct, frozen=True):
    """The keys that a statement claims from."""

    sizes: Mapping[Key, int]
    """How many events to claim of each key."""
    ordered: Sequence[Key] = ()
    """All keys that ordered handlers want, if any of them waits."""
    after: Mapping[str, int] = {}
    """The sequence after which to read, by the name of the key."""
    looked_at: frozenset[str] | None = None
    """The names of the keys, where the claim leaves out others."""
    left_out: frozenset[str] = frozenset()
    """The names of waiting keys that have to wait for their turn."""

    def share_out(self, text: str | None, live: Sequence[LiveSubscription]) -> Taken:
        """Decide which of the events found to take. ``text``: the answer of the claim."""
        found = self._found(text)
        owners, full = self._ordered(found) if self.ordered else (dict[str, Key](), set[Key]())
        for key, (sequences, ids) in found.items():
            if not key.is_ordered:
                if len(sequences) >= self.sizes[key]:
                    full.add(key)
                for event_id in ids:
                    if not event_id.startswith("-"):
                        owners.setdefault(event_id, key)
                    elif event_id[1:] not in owners:  # an ordered key will take the event in a later round
                        full.add(key)
        if not self.ordered and any(s.ordered for s in live):
            # An ordered handler was announced after the last look at the keys: the next round claims ordered keys
            # together.
            owners, full = {}, set(self.sizes)
        wanted = {s.key for s in live}
        taken: dict[Key, list[str]] = {key: [] for key in self.sizes}
        for event_id, key in owners.items():
            taken[key].append(event_id)
        return Taken(
            {key: ids for key, ids in taken.items() if ids and (key.sign, key.value) in wanted},
            frozenset(key.name for key in full),
            {} if self.ordered else {key.name: max(sequences) for key, (sequences, _) in found.items() if sequences},
        )

    def _found(self, text: str | None) -> dict[Key, tuple[list[int], list[str]]]:
        """The sequences and the ids that the claim has found of each key."""
        found: dict[Key, tuple[list[int], list[str]]] = {key: ([], []) for key in self.sizes}
        batches = list(found.values())
        for event in text.split(",") if text else ():
            number, sequence, event_id = event.split(" ")
            sequences, ids = batches[int(number)]
            sequences.append(int(sequence))
            ids.append(event_id)
        return found

    def _ordered(self, found: Mapping[Key, tuple[Sequence[int], Sequence[str]]]) -> tuple[dict[str, Key], set[Key]]:
        """The ids to take of the ordered keys, each with the first key that has found the event, and the full keys."""
        ordered = {key: batch for key, batch in found.items() if key.is_ordered and batch[0]}
        reaches = {
            key: Reach(min(sequences), max(sequences), len(sequences)) for key, (sequences, _) in ordered.items()
        }
        upto, full = share_out(reaches, self.sizes, reaches)
        owners: dict[str, Key] = {}
        for key, last in upto.items():
            for sequence, event_id in zip(*ordered[key], strict=True):
                if sequence <= last:
                    owners.setdefault(event_id, key)
        return owners, full

    def result(self, taken: Taken, notifications: int) -> FanoutResult:
        """The result of the round, with so many notifications made."""
        events = {key.name: len(ids) for key, ids in taken.ids.items()}
        if not self.left_out:
            return FanoutResult(events, taken.full, notifications, taken.reached, self.looked_at)
        if not events:  # all events of the keys are locked
            return FanoutResult(events, taken.full, notifications, taken.reached)
        return FanoutResult(events, taken.full | self.left_out, notifications, looked_at=self.looked_at)


class ClaimPlan:
    """Decides on each round, with the results of earlier rounds."""

    def __init__(self) -> None:
        self.live: Sequence[LiveSubscription] = ()
        """The live subscriptions, as the last claim has read them."""
        self._likely: Sequence[Key] = ()
        """The keys that had events last; none while a live handler is ordered."""
        self._last_turn: Key | None = None
        """The last key that was claimed from, where keys take turns."""
        self._guessed_likely = False
        """True if the last guess was of kind 1."""
        self._took_committed = False
        """True if the last round took committed events by their ids."""
        self._in_a_row = 0
        """How many rounds in a row have found events."""
        self._skips_locked_until = float("-inf")

    def guess(self, after: Mapping[str, int], behind: int | None, *, expected: bool) -> Sequence[Key]:
        """Keys that probably have events; none if the round has to ask the server."""
        is_busy = self._in_a_row >= BUSY_AFTER
        if (is_busy or behind is not None) and not any(s.ordered for s in self.live):
            keys = dict.fromkeys(s.key for s in self.live)
            if len(keys) <= (MOST_GUESSED if behind is None else MOST_AT_ONCE):
                self._guessed_likely = False
                return [Key(*key, is_ordered=False, waits=True) for key in keys]
        self._guessed_likely = expected and not after and not self._guessed_likely and bool(self._likely)
        return self._likely if self._guessed_likely else ()

    def takes_committed(self, committed: Sequence[EventRecord]) -> bool:
        """True if a round that guesses takes the events just committed here by id: at most every second round.

        The rounds between find the events that foreign processes have committed.
        """
        self._took_committed = bool(committed) and not self._took_committed
        return self._took_committed

    def claim_guessed(self, keys: Sequence[Key], request: FanoutRequest, largest_packet: int) -> Claim:
        """The claim from guessed keys."""
        behind = request.behind
        places = {key.name: behind for key in keys if behind is not None} | dict(request.after)
        sizes = _sizes(keys, request.limits, request.batch_size, largest_packet)
        return Claim(sizes, after=places, looked_at=frozenset(key.name for key in keys))

    def is_enough(self, done: FanoutResult, behind: int | None) -> bool:
        """True if a round that guessed is over. Otherwise the round asks the server which keys have events."""
        if done.events:
            self._in_a_row += 1
            return True
        if behind is not None and not self._guessed_likely:  # all keys were read, as far as the request asked
            self._in_a_row = 0
            return True
        return False

    def claim(
        self, wanted: Sequence[Key], request: FanoutRequest, after: Mapping[str, int], largest_packet: int
    ) -> Claim | None:
        """The claim from the keys that wait; ``None`` if no key waits. ``wanted``: the answer of the server."""
        self._took_committed = False  # this round finds the events of foreign processes
        waiting = [key for key in wanted if key.waits]
        ordered = [key for key in wanted if key.is_ordered]
        if ordered:
            self._likely = ()
        elif waiting:
            self._likely = waiting[:MOST_GUESSED]
        if not waiting:
            return None
        # An ordered key waits: all ordered keys are claimed from, because a further ordered key may by now have an
        # event with a lower sequence.
        if any(key.waits for key in ordered):
            waiting += [key for key in ordered if not key.waits]
        limits, batch_size = request.limits, request.batch_size
        if ordered or len(waiting) <= MOST_AT_ONCE:
            return Claim(_sizes(waiting, limits, batch_size, largest_packet), ordered, {} if ordered else after)
        keys = self._in_turn(waiting)
        widened = {key.name: limits[key.name] * len(waiting) // len(keys) for key in keys if key.name in limits}
        looked_at = frozenset(key.name for key in keys)
        left_out = frozenset(key.name for key in waiting) - looked_at
        return Claim(_sizes(keys, widened, batch_size, largest_packet), looked_at=looked_at, left_out=left_out)

    def ended(self, done: FanoutResult) -> None:
        """Take in the result of a round that asked the server."""
        self._in_a_row = self._in_a_row + 1 if done.events else 0

    def skips_locked(self, claim: Claim, now: float, *, can_refuse_to_wait: bool) -> bool:
        """True if the claim locks events, and skips locked events.

        ``can_refuse_to_wait``: the server can fail at once instead, when the events are marked (MariaDB).
        """
        return not can_refuse_to_wait or bool(claim.ordered) or now < self._skips_locked_until

    def met_locked(self, now: float) -> None:
        """A round has met a locked event."""
        self._skips_locked_until = now + SKIP_LOCKED_FOR

    def _in_turn(self, waiting: Sequence[Key]) -> Sequence[Key]:
        """The next ``MOST_AT_ONCE`` of many waiting keys, behind the last key of the round before."""
        places = sorted(waiting, key=_place)
        last = self._last_turn
        behind = 0 if last is None else bisect_right(places, _place(last), key=_place)
        keys = (places[behind:] + places[:behind])[:MOST_AT_ONCE]
        self._last_turn = keys[-1]
        return keys


def _place(key: Key) -> tuple[str, str]:
    return key.sign, key.value


def _sizes(keys: Sequence[Key], limits: Mapping[str, int], batch_size: int, largest_packet: int) -> dict[Key, int]:
    """How many events to claim of each key. Event types come before topics.

    Keys without a limit share a batch. All events together fit into a message.
    """
    share = max(1, batch_size // max(1, sum(key.waits and key.name not in limits for key in keys)))
    most = max(1, largest_packet // (BYTES_OF_EVENT * len(keys)))
    return {key: min(most, limits.get(key.name, share)) for key in sorted(keys, key=lambda key: key.sign)}
