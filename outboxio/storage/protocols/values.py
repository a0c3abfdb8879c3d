"""The values that are passed between outboxio and a database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.model.event import EventRecord
from outboxio.model.lock_name import Slot
from outboxio.model.notification import Handoff, Position

#: How many intervals without a heartbeat end the session with the cluster locks, so that the process stops trusting its
#: locks. A standby then has the remainder of two intervals to take over.
LONGEST_SILENCE = 1.8

#: The age of the last proof at which the next one is due, in heartbeat intervals.
SHARE_OF_HEARTBEAT = 0.9


class CommitLost(Exception):
    """The connection was lost during COMMIT, so it is unknown whether the transaction was committed."""


class TransactionLost(Exception):
    """The transaction ended before the events were written, because of an earlier statement or a deadlock."""


class FanoutRequest(Struct, frozen=True, gc=False):
    """A round of fan-out: which undelivered events to take, and where each index scan starts.

    A *key* is an event type, or a topic with a leading ``#``.
    """

    namespace: str
    now: datetime
    seen_since: datetime
    """Subscriptions that were announced after this time count."""
    limits: Mapping[str, int]
    """The maximum number of events to take of each key."""
    batch_size: int
    """The maximum number of events to take of all keys that are not in ``limits``."""
    after: Mapping[str, int] = {}
    """The sequence after which to scan, by key. A dialect may ignore ``after``, ``behind`` and ``closed``."""
    behind: int | None = None
    """The sequence after which to scan the other keys without ordered handlers."""
    closed: int | None = None
    """The sequence after which to scan keys of ordered handlers: no event below can still be committed."""
    expected: bool = False
    """True if this process has just committed events, so a check whether there are any would waste a round trip."""
    committed: Sequence[EventRecord] = ()
    """The events that this process has just committed, if known and few. A dialect may ignore them."""
    handoff: Handoff | None = None
    """Receives the notifications that are due immediately, once written. A dialect may ignore it."""


class FanoutResult(Struct, frozen=True):
    """The result of a round of fan-out. A *key* is an event type, or a topic with a leading ``#``."""

    events: Mapping[str, int]
    """How many events of each key were marked delivered."""
    full: frozenset[str]
    """The keys that reached their limit and probably have more events."""
    notifications: int
    """How many notifications were written."""
    reached: Mapping[str, int] = {}
    """The highest sequence of each key, if the dialect reports sequences."""
    looked_at: frozenset[str] | None = None
    """The keys that were read, if not all of them; ``None``: all keys."""
    transactions: tuple[int, int] | None = None
    """The ids of the oldest open and of the next transaction, if the database numbers transactions."""


class Waiting(Struct, frozen=True):
    """The number of undelivered events, counted up to a limit."""

    number: int
    oldest: datetime | None
    """The earliest ``event_date`` among the counted events."""


class ConsumeResult(Struct, frozen=True):
    """A row of ``consumed_events``: an inbox message and the handler that received it."""

    source: str
    external_id: str
    handler_name: str
    event_id: UUID
    payload_hash: str
    consumed_date: datetime


class NewNotification(Struct, frozen=True, kw_only=True):
    """A notification that is created outside of fan-out. The other columns are copied from the event."""

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
    """The result of a batch of purging old rows."""

    removed: int
    position: UUID | None
    """The id of the last row that was read.

    ``None`` at the end: after the last row, or after a batch in which all rows are too young, because ids are in time
    order.
    """


class Pause(Struct, frozen=True):
    """The pause of a handler by an operator."""

    handler_name: str
    ended_date: datetime | None
    """The end of the pause; ``None`` while the handler is paused."""
    paused_date: datetime | None = None
    """The start of the pause; ``None`` if it was not read."""


class Announced(Struct, frozen=True):
    """A row of ``subscriptions``."""

    handler_name: str
    event_type: str
    topic: str
    aliases: tuple[str, ...]
    last_seen_date: datetime
    """When a process with the handler last announced the subscription."""

    @property
    def names(self) -> frozenset[str]:
        """The names under which rows of the handler may be stored."""
        return frozenset((self.handler_name, *self.aliases))


class LockGrant(Struct, frozen=True):
    """A cluster lock that this process has just acquired, with a new term."""

    term: int
    released_term: int
    """The last term that a holder has released."""

    @property
    def follows_crash(self) -> bool:
        """True if the previous holder did not release the lock: its process died, or its session ended."""
        return self.released_term < self.term - 1


class StartedRun(Struct, frozen=True):
    """A run that was recorded before its start."""

    notification_id: UUID
    handler_name: str
    starts: int
    """How many runs of this notification have started since one last ended."""
    partition_number: int = 0
    """The partition of the notification, known only for records that were read."""

    @property
    def slot(self) -> Slot:
        """The slot to which the notification belongs."""
        return Slot(self.handler_name, self.partition_number)


class PartitionCount(Struct, frozen=True):
    """A row of ``handler_partitions``. A stored handler name without a row has a single partition."""

    handler_name: str
    number: int
    """Over how many partitions new notifications are spread."""
    active: int
    """Only partitions below this number can have unfinished rows; at least ``number``."""
    changed_date: datetime
    """When ``number`` was last changed."""
    declared: int = 1
    """The largest count that the code of a process has declared."""
    auto_number: int | None = None
    """The count that outboxio has chosen by load; ``None`` if code or an operator has set ``number``."""
    waited_date: datetime | None = None
    """When due rows last waited longer than a second, to the hour; for automatic counts."""

    @property
    def is_automatic(self) -> bool:
        """True if outboxio may change the count: neither an operator nor code has set a different one since."""
        return self.number == self.auto_number


def active_partitions(counts: Mapping[str, PartitionCount], handler_name: str) -> int:
    """Return in how many partitions a stored handler name can have unfinished rows."""
    return counts[handler_name].active if handler_name in counts else 1


def slots_of(counts: Mapping[str, PartitionCount], handler_names: Iterable[str]) -> list[Slot]:
    """Return the slots of stored handler names, in the order of the names."""
    return [Slot(name, partition) for name in handler_names for partition in range(active_partitions(counts, name))]


class ControlState(Struct, frozen=True):
    """What applies to the handlers of all processes: pauses, and partition counts."""

    pauses: Sequence[Pause]
    partitions: Sequence[PartitionCount] = ()
    has_cancels: bool = False
    """True if an operator may have cancelled runs."""


class Instance(Struct, frozen=True):
    """A row of ``instances``: a process that shares handlers. The row is only a hint that the process is alive."""

    instance: str
    """The name of the process in ``leases``."""
    names: tuple[str, ...]
    """The stored handler names whose locks the process acquires."""
    last_seen_date: datetime


class SeenLease(Struct, frozen=True):
    """A row of ``leases``, read without a lock."""

    owner: str
    term: int
    released_term: int
    is_of_instance: bool = False
    """True if the owner has a row in ``instances``, however old. Owners of versions without partitions have none."""

    @property
    def is_released(self) -> bool:
        """True if the last holder has released the lock. Otherwise a process holds it, or died while holding it."""
        return self.released_term >= self.term


class Holder(Struct, frozen=True):
    """The last holder of a cluster lock according to ``leases``, where a dead holder stays until a takeover."""

    owner: str
    since: datetime
    """When the holder acquired the lock."""
    is_released: bool


class ClusterView(Struct, frozen=True):
    """A snapshot of the processes and leases of a namespace, which may be outdated on arrival."""

    instances: Sequence[Instance]
    leases: Mapping[str, SeenLease]
    """The leases by name. Locks that were never acquired have no lease."""


class RehashResult(Struct, frozen=True):
    """The result of rehashing a chunk of a slot's rows into the partitions to which they now belong."""

    moved: int
    position: Position | None
    """The position of the last row that was read; ``None`` after the last row of the slot."""
