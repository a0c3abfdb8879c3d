"""Decides from which keys a round of fan-out claims events, how many, and from which sequence on. No I/O.

Reading which keys have undelivered events takes as long as the rest of a small round. So a round may guess the keys
(decision 13):

1. This process has just committed events: they probably have the same keys as the last ones (``expected``).
2. Each of the last two rounds found events: the next round will probably find some too, if there are few keys.
3. Fan-out reads after a sequence (``behind``): all keys are claimed from, because the query for keys with events would
   start at the beginning of each key.

A round that guessed and found no events queries the server, and so does the round after a guess of kind 1. Guesses are
only made while no live handler is ordered: ordered keys must be claimed together, in a single snapshot of the table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from outboxio.model.event import EventRecord
from outboxio.storage.fanout_bounds import KeyRange, fanout_bounds
from outboxio.storage.protocols import FanoutRequest, FanoutResult

# --- live subscriptions ----------------------------------------------------------------------------
#
# Live subscriptions, and the keys (event types and topics) that live handlers subscribe to.


class Key(Struct, frozen=True):
    """An event type or a topic that a live handler subscribes to."""

    sign: str
    """``#`` for a topic, empty for an event type."""
    value: str
    is_ordered: bool
    """True if an ordered handler subscribes to the key."""
    waits: bool
    """True if the key has undelivered events."""

    @property
    def name(self) -> str:
        """The name of the key in :class:`FanoutRequest` and :class:`FanoutResult`."""
        return f"{self.sign}{self.value}"


class LiveSubscription(Struct, frozen=True, array_like=True):
    """A handler's subscription to an event type or a topic, as returned by ``SUBSCRIPTIONS`` in ``fanout.py``."""

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
    """Return the live subscriptions that get new notifications: all except those of an alias of a live handler.

    After a rename that was reverted, two names are aliases of each other; the name that was seen last counts.
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
    """Map the id of each event with a live subscription to the name of its key; the event type takes precedence."""
    subscribed_keys = {s.key for s in subscriptions}
    keys: dict[str, str] = {}
    for event in events:
        if event.event_type is not None and ("", event.event_type) in subscribed_keys:
            keys[str(event.id)] = event.event_type
        elif event.topic is not None and ("#", event.topic) in subscribed_keys:
            keys[str(event.id)] = f"#{event.topic}"
    return keys


# --- the plan ----------------------------------------------------------------------------------------


MAX_GUESSED = 8  # keys that are claimed from without querying the server first
BUSY_AFTER = 2  # consecutive rounds that found events
MAX_KEYS_PER_CLAIM = 64  # planning more branches would take longer than reading the rows
BYTES_OF_EVENT = 100  # the most that an event takes in a message: its id, twice
SKIP_LOCKED_SECONDS = 60.0  # how long claims skip locked events after a round encountered one


class Taken(Struct, frozen=True):
    """The events to take from those that a claim has found."""

    ids: Mapping[Key, Sequence[str]]
    """The ids to take, by key. Keys without ids are left out."""
    full: frozenset[str]
    """The names of the keys that probably have more events."""
    reached: Mapping[str, int]
    """The highest sequence that was found, by the name of the key."""


class Claim(Struct, frozen=True):
    """The keys that a statement claims from."""

    sizes: Mapping[Key, int]
    """How many events to claim of each key."""
    ordered: Sequence[Key] = ()
    """All keys of ordered handlers, if any of them has undelivered events."""
    after: Mapping[str, int] = {}
    """The sequence after which to read, by the name of the key."""
    looked_at: frozenset[str] | None = None
    """The names of the keys, if the claim does not read all keys."""
    left_out: frozenset[str] = frozenset()
    """The names of keys with undelivered events that a later claim reads."""

    def select_events(self, text: str | None, live: Sequence[LiveSubscription]) -> Taken:
        """Select which of the found events to take. ``text``: the result of the claim."""
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
            # An ordered handler was announced after the keys were read: the next round claims ordered keys together.
            owners, full = {}, set(self.sizes)
        subscribed_keys = {s.key for s in live}
        taken: dict[Key, list[str]] = {key: [] for key in self.sizes}
        for event_id, key in owners.items():
            taken[key].append(event_id)
        return Taken(
            {key: ids for key, ids in taken.items() if ids and (key.sign, key.value) in subscribed_keys},
            frozenset(key.name for key in full),
            {} if self.ordered else {key.name: max(sequences) for key, (sequences, _) in found.items() if sequences},
        )

    def _found(self, text: str | None) -> dict[Key, tuple[list[int], list[str]]]:
        """Parse the sequences and ids that the claim found for each key."""
        found: dict[Key, tuple[list[int], list[str]]] = {key: ([], []) for key in self.sizes}
        batches = list(found.values())
        for event in text.split(",") if text else ():
            number, sequence, event_id = event.split(" ")
            sequences, ids = batches[int(number)]
            sequences.append(int(sequence))
            ids.append(event_id)
        return found

    def _ordered(self, found: Mapping[Key, tuple[Sequence[int], Sequence[str]]]) -> tuple[dict[str, Key], set[Key]]:
        """Return the ids to take of ordered keys, each with the first key that found the event, and the full keys."""
        ordered = {key: batch for key, batch in found.items() if key.is_ordered and batch[0]}
        ranges = {
            key: KeyRange(min(sequences), max(sequences), len(sequences)) for key, (sequences, _) in ordered.items()
        }
        upto, full = fanout_bounds(ranges, self.sizes, ranges)
        owners: dict[str, Key] = {}
        for key, last in upto.items():
            for sequence, event_id in zip(*ordered[key], strict=True):
                if sequence <= last:
                    owners.setdefault(event_id, key)
        return owners, full

    def result(self, taken: Taken, notifications: int) -> FanoutResult:
        """Return the result of the round. ``notifications``: how many were created."""
        events = {key.name: len(ids) for key, ids in taken.ids.items()}
        if not self.left_out:
            return FanoutResult(events, taken.full, notifications, taken.reached, self.looked_at)
        if not events:  # all events of the keys are locked
            return FanoutResult(events, taken.full, notifications, taken.reached)
        return FanoutResult(events, taken.full | self.left_out, notifications, looked_at=self.looked_at)


class ClaimPlan:
    """Plans each round from the results of earlier rounds."""

    def __init__(self) -> None:
        self.live: Sequence[LiveSubscription] = ()
        """The live subscriptions, as the last claim has read them."""
        self._likely: Sequence[Key] = ()
        """The keys that had events last; none while a live handler is ordered."""
        self._last_in_rotation: Key | None = None
        """The last key of the previous claim, if there are too many keys for one claim."""
        self._guessed_likely = False
        """True if the last guess was of kind 1."""
        self._took_committed = False
        """True if the last round took committed events by their ids."""
        self._in_a_row = 0
        """How many consecutive rounds found events."""
        self._skips_locked_until = float("-inf")

    def guess(self, after: Mapping[str, int], behind: int | None, *, expected: bool) -> Sequence[Key]:
        """Return keys that probably have events; none if the round must query the server."""
        is_busy = self._in_a_row >= BUSY_AFTER
        if (is_busy or behind is not None) and not any(s.ordered for s in self.live):
            keys = dict.fromkeys(s.key for s in self.live)
            if len(keys) <= (MAX_GUESSED if behind is None else MAX_KEYS_PER_CLAIM):
                self._guessed_likely = False
                return [Key(*key, is_ordered=False, waits=True) for key in keys]
        self._guessed_likely = expected and not after and not self._guessed_likely and bool(self._likely)
        return self._likely if self._guessed_likely else ()

    def takes_committed(self, committed: Sequence[EventRecord]) -> bool:
        """True if a guessing round takes the events that this process has just committed, by id.

        This is at most every second round; the rounds between find the events of other processes.
        """
        self._took_committed = bool(committed) and not self._took_committed
        return self._took_committed

    def claim_guessed(self, keys: Sequence[Key], request: FanoutRequest, largest_packet: int) -> Claim:
        """Return the claim from guessed keys."""
        behind = request.behind
        positions = {key.name: behind for key in keys if behind is not None} | dict(request.after)
        sizes = _sizes(keys, request.limits, request.batch_size, largest_packet)
        return Claim(sizes, after=positions, looked_at=frozenset(key.name for key in keys))

    def is_enough(self, done: FanoutResult, behind: int | None) -> bool:
        """True if a round that guessed is done. Otherwise it must query the server for keys with events."""
        if done.events:
            self._in_a_row += 1
            return True
        if behind is not None and not self._guessed_likely:  # all requested keys were read
            self._in_a_row = 0
            return True
        return False

    def claim(
        self, keys: Sequence[Key], request: FanoutRequest, after: Mapping[str, int], largest_packet: int
    ) -> Claim | None:
        """Return the claim from ``keys`` that have undelivered events; ``None`` if there are none."""
        self._took_committed = False  # this round finds the events of other processes
        waiting = [key for key in keys if key.waits]
        ordered = [key for key in keys if key.is_ordered]
        if ordered:
            self._likely = ()
        elif waiting:
            self._likely = waiting[:MAX_GUESSED]
        if not waiting:
            return None
        # If an ordered key has events, claim from all ordered keys: another one may by now have an event with a lower
        # sequence.
        if any(key.waits for key in ordered):
            waiting += [key for key in ordered if not key.waits]
        limits, batch_size = request.limits, request.batch_size
        if ordered or len(waiting) <= MAX_KEYS_PER_CLAIM:
            return Claim(_sizes(waiting, limits, batch_size, largest_packet), ordered, {} if ordered else after)
        keys = self._next_in_rotation(waiting)
        widened = {key.name: limits[key.name] * len(waiting) // len(keys) for key in keys if key.name in limits}
        looked_at = frozenset(key.name for key in keys)
        left_out = frozenset(key.name for key in waiting) - looked_at
        return Claim(_sizes(keys, widened, batch_size, largest_packet), looked_at=looked_at, left_out=left_out)

    def ended(self, done: FanoutResult) -> None:
        """Record the result of a round that queried the server."""
        self._in_a_row = self._in_a_row + 1 if done.events else 0

    def skips_locked(self, claim: Claim, now: float, *, can_refuse_to_wait: bool) -> bool:
        """True if the claim locks events and skips locked ones.

        ``can_refuse_to_wait``: the server can instead fail immediately when the events are marked (MariaDB).
        """
        return not can_refuse_to_wait or bool(claim.ordered) or now < self._skips_locked_until

    def met_locked(self, now: float) -> None:
        """Record that a round encountered a locked event."""
        self._skips_locked_until = now + SKIP_LOCKED_SECONDS

    def _next_in_rotation(self, waiting: Sequence[Key]) -> Sequence[Key]:
        """Return the next ``MAX_KEYS_PER_CLAIM`` of many keys, after the last key of the previous round."""
        keys = sorted(waiting, key=_sort_key)
        last = self._last_in_rotation
        start = 0 if last is None else bisect_right(keys, _sort_key(last), key=_sort_key)
        selected = (keys[start:] + keys[:start])[:MAX_KEYS_PER_CLAIM]
        self._last_in_rotation = selected[-1]
        return selected


def _sort_key(key: Key) -> tuple[str, str]:
    return key.sign, key.value


def _sizes(keys: Sequence[Key], limits: Mapping[str, int], batch_size: int, largest_packet: int) -> dict[Key, int]:
    """Return how many events to claim of each key, event types before topics.

    Keys without a limit share a batch. All events together fit into one message.
    """
    share = max(1, batch_size // max(1, sum(key.waits and key.name not in limits for key in keys)))
    most = max(1, largest_packet // (BYTES_OF_EVENT * len(keys)))
    return {key: min(most, limits.get(key.name, share)) for key in sorted(keys, key=lambda key: key.sign)}
