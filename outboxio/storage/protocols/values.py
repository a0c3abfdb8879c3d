"""The values that cross the seam between outboxio and a database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.model.event import EventRecord
from outboxio.model.lock_name import Slot
from outboxio.model.notification import Handoff, Position

#: The silence of the session with the cluster locks, in heartbeat intervals, after which the server ends the session
#: and its process stops trusting the locks. A standby has the rest of two intervals to take over.
LONGEST_SILENCE = 1.8

#: The age of the last proof at which the next proof is due, in heartbeat intervals.
SHARE_OF_HEARTBEAT = 0.9


class CommitLost(Exception):
    """The connection was lost during COMMIT, so the transaction may have been committed or not."""


class TransactionLost(Exception):
    """The transaction ended before the events were written: an earlier statement ended it, or a deadlock did."""


class FanoutRequest(Struct, frozen=True, gc=False):
    """A round of fan-out: which undelivered events to take, and where each scan of the index starts.

    A *key* is an event type, or a topic with ``#`` in front.
    """

    namespace: str
    now: datetime
    seen_since: datetime
    """Subscriptions that were announced after this moment count."""
    limits: Mapping[str, int]
    """How many events of each key to take at most."""
    batch_size: int
    """How many events to take at most of all keys without a limit in ``limits``."""
    after: Mapping[str, int] = {}
    """The sequence after which to scan, by key. A dialect may ignore ``after``, ``behind`` and ``closed``."""
    behind: int | None = None
    """The sequence after which to scan the remaining keys that no ordered handler wants."""
    closed: int | None = None
    """The sequence after which to scan keys that ordered handlers want: no event below can still commit."""
    expected: bool = False
    """True if this process has just committed events, so that asking for undelivered events only costs a round trip."""
    committed: Sequence[EventRecord] = ()
    """The events that this process has just committed, if known and few. A dialect may ignore the events."""
    handoff: Handoff | None = None
    """Receives the notifications that are due at once, as soon as written. A dialect may ignore the handoff."""


class FanoutResult(Struct, frozen=True):
    """The outcome of a round of fan-out. A *key* is an event type, or a topic with ``#`` in front."""

    events: Mapping[str, int]
    """How many events of each key were marked delivered."""
    full: frozenset[str]
    """The keys that reached the limit, so that more events probably wait."""
    notifications: int
    """How many notifications were written."""
    reached: Mapping[str, int] = {}
    """The highest sequence of each key, if the dialect reports sequences."""
    looked_at: frozenset[str] | None = None
    """The keys that were read, if the dialect read only some keys; ``None``: all keys."""
    transactions: tuple[int, int] | None = None
    """The numbers of the oldest open and of the next transaction, if the database numbers transactions."""


class Waiting(Struct, frozen=True):
    """The number of undelivered events, counted up to a limit."""

    number: int
    oldest: datetime | None
    """The earliest ``event_date`` among the counted events."""


class ConsumeResult(Struct, frozen=True):
    """A row of ``consumed_events``: an inbox message and the receiving handler."""

    source: str
    external_id: str
    handler_name: str
    event_id: UUID
    payload_hash: str
    consumed_date: datetime


class NewNotification(Struct, frozen=True, kw_only=True):
    """A notification that is made outside of fan-out. The remaining columns are copied from the event."""

    id: UUID
    handler_name: str
    state: str
    attempts: int
    next_retry_at: datetime
    errors: str
    """A JSON array."""
    ordering_key: str | None
    priority: int


class Head(Struct, frozen=True):
    """The first row in the key queue of an ordering key."""

    id: UUID
    state: str


class PurgeResult(Struct, frozen=True):
    """The outcome of a batch of removing old rows."""

    removed: int
    position: UUID | None
    """The id of the last row that was read.

    ``None`` at the end: after the last row, or after a batch in which all rows were too young, because ids grow with
    time.
    """


class Pause(Struct, frozen=True):
    """The pause of a handler by an operator."""

    handler_name: str
    ended_date: datetime | None
    """The end of the pause; ``None`` while the handler is paused."""
    paused_date: datetime | None = None
    """The beginning of the pause; ``None`` if the beginning was not read."""


class Announced(Struct, frozen=True):
    """A row of ``subscriptions``."""

    handler_name: str
    event_type: str
    topic: str
    aliases: tuple[str, ...]
    last_seen_date: datetime
    """The last moment at which a process with the handler announced the subscription."""

    @property
    def names(self) -> frozenset[str]:
        """The names under which rows of the handler may be stored."""
        return frozenset((self.handler_name, *self.aliases))


class LockGrant(Struct, frozen=True):
    """A cluster lock that this process has just taken, under a new term."""

    term: int
    released_term: int
    """The last term that a holder gave back."""

    @property
    def follows_crash(self) -> bool:
        """True if the former holder did not give the lock back: the process died, or the session ended."""
        return self.released_term < self.term - 1


class StartedRun(Struct, frozen=True):
    """A run that was recorded before its beginning."""

    notification_id: UUID
    handler_name: str
    starts: int
    """How many runs of this notification began since a run ended."""
    partition_number: int = 0
    """The partition of the notification. Only a record that was found has the number."""

    @property
    def slot(self) -> Slot:
        """The slot to which the notification belongs."""
        return Slot(self.handler_name, self.partition_number)


class PartitionCount(Struct, frozen=True):
    """A row of ``handler_partitions``. A stored handler name without a row has a single partition."""

    handler_name: str
    number: int
    """The number of partitions over which new notifications are spread."""
    active: int
    """Only partitions below this number may have unfinished rows; at least ``number``."""
    changed_date: datetime
    """The last moment at which ``number`` was changed."""
    declared: int = 1
    """The largest number that the code of a process has asked for."""
    auto_number: int | None = None
    """The number that outboxio has set by the load; ``None`` if code or an operator has set ``number``."""
    waited_date: datetime | None = None
    """The last time, to the hour, at which due rows waited for longer than a second; for an automatic number."""

    @property
    def is_automatic(self) -> bool:
        """True if outboxio may change the number: neither an operator nor code has set a different number since."""
        return self.number == self.auto_number


def active_partitions(counts: Mapping[str, PartitionCount], handler_name: str) -> int:
    """The partitions in which a stored handler name may have unfinished rows."""
    return counts[handler_name].active if handler_name in counts else 1


def slots_of(counts: Mapping[str, PartitionCount], handler_names: Iterable[str]) -> list[Slot]:
    """The slots of stored handler names, the names in the given order."""
    return [Slot(name, partition) for name in handler_names for partition in range(active_partitions(counts, name))]


class Orders(Struct, frozen=True):
    """The decisions that hold for the handlers of all processes: the pauses, and the numbers of partitions."""

    pauses: Sequence[Pause]
    partitions: Sequence[PartitionCount] = ()
    has_cancels: bool = False
    """True if an operator may want a run cancelled."""


class Instance(Struct, frozen=True):
    """A row of ``instances``: a process that shares handlers. The row is a hint, and no proof of life."""

    instance: str
    """The name of the process in ``leases``."""
    names: tuple[str, ...]
    """The stored handler names of which the process takes locks."""
    last_seen_date: datetime


class SeenLease(Struct, frozen=True):
    """A row of ``leases``, read without a lock."""

    owner: str
    term: int
    released_term: int
    is_of_instance: bool = False
    """True if the owner has a row in ``instances``, however old: an owner of a version without partitions has none."""

    @property
    def is_given_back(self) -> bool:
        """True if the last holder gave the lock back. Otherwise a process holds the lock, or died with the lock."""
        return self.released_term >= self.term


class Holder(Struct, frozen=True):
    """The last holder of a cluster lock, as ``leases`` has it. A holder that died is in ``leases`` until a takeover."""

    owner: str
    since: datetime
    """The moment at which the holder took the lock."""
    has_given_back: bool


class ClusterView(Struct, frozen=True):
    """The processes and leases of a namespace at a moment. The view may be out of date when it arrives."""

    instances: Sequence[Instance]
    leases: Mapping[str, SeenLease]
    """The leases by name. A lock that was never taken has no lease."""


class Rehomed(Struct, frozen=True):
    """The outcome of moving a piece of a slot's rows to the partitions that the rows belong to now."""

    moved: int
    position: Position | None
    """The position of the last row that was read; ``None`` after the last row of the slot."""
