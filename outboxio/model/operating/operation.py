"""Operations and jobs as recorded, and actions and events as shown to operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Literal, TypeVar
from uuid import UUID

from msgspec import Struct

from outboxio.model.notification import State


class OperationState(StrEnum):
    """The state of an operation. All states except RUNNING are final."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    STOPPED = "STOPPED"
    """An operator stopped the operation. Changes already made remain."""
    FAILED = "FAILED"


class Operation(Struct, frozen=True, kw_only=True):
    """An operator's operation: a row of ``operations``, or the result of a dry run, which writes no row."""

    id: UUID
    kind: str
    """The kind: ``retry``, ``skip``, ``cancel``, ``resume``, ``replay``, ``backfill``, ``pause``, ``unpause``,
    ``purge``, ``unsubscribe``, ``bootstrap``, ``partitions``, ``pause_job``, ``unpause_job``, ``run_job_now``,
    ``remove_job``."""
    state: OperationState = OperationState.RUNNING
    matched: int = 0
    """The number of notifications that the filter has matched so far; complete in the state DONE."""
    done: int = 0
    """The number of notifications that were changed."""
    refused: int = 0
    """The number of matched notifications that cannot be changed, such as those that have succeeded."""
    request: dict[str, object]
    """The filter and the other arguments."""
    actor: str
    origin: str
    """Where the operation was requested: ``code``, ``cli``, ``dashboard``."""
    reason: str | None
    created_date: datetime
    updated_date: datetime
    finished_date: datetime | None = None
    error: str | None = None
    """Why the operation failed. For ``cancel``: why no run was cancelled, or that the run is stuck."""
    shard: str
    """The name of the shard, or of all shards of the operation, separated by commas."""
    is_dry_run: bool = False
    is_complete: bool = True
    """False if the count of a dry run stopped at its limit, so there may be more matches."""

    @property
    def has_ended(self) -> bool:
        """True unless the operation is RUNNING."""
        return self.state is not OperationState.RUNNING


# --- jobs -----------------------------------------------------------------------------------------


JobState = Literal["WAITING", "RUNNING", "RETRYING"]
JobResult = Literal["SUCCEEDED", "FAILED", "TIMED_OUT", "INTERRUPTED"]


class JobRow(Struct, frozen=True):
    """A row of ``jobs``: a function that runs once in the cluster for each scheduled time. Dates are naive UTC.

    - ``name``, ``schedule``: the job, and its schedule as text.
    - ``state``: ``RUNNING`` while a process runs the job, ``RETRYING`` between two attempts, otherwise ``WAITING``.
    - ``next_date``: the next scheduled time. ``due_date``: when a process checks the row.
    - ``term``: increases with each run. A run can update the row only under its own term.
    - ``attempts``, ``moment_date``, ``instance``, ``started_date``: the current or last run; ``moment_date`` is its
      scheduled time.
    - ``lease``, ``lease_term``: the cluster lock under which the run started.
    - ``finished_date``, ``result``, ``error``: the result of the last run.
    - ``succeeded``, ``failed``, ``missed``: the numbers of runs, and of scheduled times without a run.
    - ``paused_date``: when an operator paused the job. ``ordered_date``: when an operator requested a run.

    Example::

        for job in await outbox.admin.jobs():
            print(job.name, job.state, job.next_date, job.result, job.error)
    """

    name: str
    schedule: str
    state: JobState
    next_date: datetime
    due_date: datetime
    term: int = 0
    attempts: int = 0
    moment_date: datetime | None = None
    lease: str = ""
    lease_term: int = 0
    instance: str = ""
    started_date: datetime | None = None
    finished_date: datetime | None = None
    result: JobResult | None = None
    error: str | None = None
    succeeded: int = 0
    failed: int = 0
    missed: int = 0
    paused_date: datetime | None = None
    ordered_date: datetime | None = None

    @property
    def has_failed(self) -> bool:
        """True if the last finished run was not successful, and is neither waiting for a retry nor being retried."""
        is_retried = self.state == "RETRYING" or (self.state == "RUNNING" and self.attempts > 1)
        return self.result not in (None, "SUCCEEDED") and not is_retried


# --- bounded results: a page of a list, and a count -----------------------------------------------


T = TypeVar("T")


class Page(list[T]):
    """A page of a list, newest first, and the cursor of the next page.

    Example::

        page = await outbox.admin.list(state="DEAD")
        while page.next is not None:
            page = await outbox.admin.list(state="DEAD", after=page.next)
    """

    def __init__(self, rows: Iterable[T] = (), next: str | None = None) -> None:
        super().__init__(rows)
        self.next = next
        """The argument ``after`` for the next page; ``None`` at the end of the list.

        A page may have fewer rows than the limit, or none, although there is a next page, because reads are bounded.
        """


class BoundedCount(int):
    """A number that was counted up to a limit. ``str`` shows a count that reached the limit as ``10,000+``.

    Example::

        dead = await outbox.admin.count(Filter(states=("DEAD",)))
        print(f"{dead} dead letters")  # 10,000+ dead letters
    """

    is_complete: bool
    """False if there may be more matches."""

    def __new__(cls, number: int, *, is_complete: bool = True) -> BoundedCount:
        made = super().__new__(cls, number)
        made.is_complete = is_complete
        return made

    def __str__(self) -> str:
        return f"{int(self):,}{'' if self.is_complete else '+'}"

    def __repr__(self) -> str:
        return str(self)

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec else str(self)


class EmittedEvent(Struct, frozen=True, kw_only=True):
    """An event of an action, without its documents."""

    id: UUID
    sequence: int
    event_type: str
    model_type: str | None
    model_id: str | None
    ordering_key: str | None
    is_delivered: bool
    """True if fan-out has created the notifications."""
    states: Mapping[str, int]
    """The number of the event's notifications in each state."""

    @property
    def worst(self) -> State | None:
        """The worst state of the event's notifications; ``None`` without notifications."""
        return worst_of(self.states)


class StoredAction(Struct, frozen=True, kw_only=True):
    """An executed action, read from its events. Dates are naive UTC.

    Example::

        for action in await outbox.admin.actions():
            print(action.started_date, action.name, "did nothing" if action.is_empty else action.worst)
    """

    id: UUID
    name: str
    started_date: datetime
    completion_date: datetime
    correlation_id: str | None
    causation_id: UUID | None
    """The event whose handler executed the action; ``None`` for an action that your application executed."""
    hops: int
    source: str | None
    events: tuple[EmittedEvent, ...]
    """The events in the order in which they were emitted; at most 20."""
    is_complete: bool
    """False if the action has more events."""
    shard: str

    @property
    def is_empty(self) -> bool:
        """True if the action emitted nothing."""
        return not self.events

    @property
    def worst(self) -> State | None:
        """The worst state of all notifications of the action's events; ``None`` without notifications."""
        return worst_of({str(event.worst): 1 for event in self.events if event.worst is not None})


# --- events, and the tree of what an event has caused ---------------------------------------------


#: The states of notifications, the worst first.
WORST_FIRST = (
    State.DEAD, State.EXPIRED, State.DYING, State.FAILED, State.BLOCKED, State.PENDING, State.SKIPPED, State.SUCCEEDED,
)  # fmt: skip


def worst_of(states: Mapping[str, int]) -> State | None:
    """Return the worst state with a notification; ``None`` if there is none."""
    return next((state for state in WORST_FIRST if states.get(state)), None)


class EventColumns(Struct, frozen=True, kw_only=True):
    """The columns of a row of ``events``, except documents and the columns of fan-out."""

    id: UUID
    sequence: int
    event_type: str | None
    """``None`` for the sentinel event of an action that emitted nothing."""
    model_type: str | None
    model_id: str | None
    action_id: UUID
    action_name: str
    event_date: datetime
    available_at: datetime | None
    topic: str | None
    source: str | None
    ordering_key: str | None
    correlation_id: str | None
    causation_id: UUID | None
    hops: int


class StoredEvent(EventColumns, frozen=True, kw_only=True):
    """A row of ``events``. Documents are shown as ``Outbox(redact=...)`` returns them. Dates are naive UTC."""

    action_params: dict[str, object]
    payload: dict[str, object] | None
    headers: dict[str, object] | None
    is_delivered: bool
    """True if fan-out has created the notifications."""
    shard: str


class TreeNode(Struct, frozen=True, kw_only=True):
    """An event in the tree of causation."""

    event: StoredEvent
    states: Mapping[str, int]
    """The number of the event's notifications in each state."""
    children: tuple[TreeNode, ...]
    """The events that handlers of this event have emitted."""

    @property
    def worst(self) -> State | None:
        """The worst state of the event's notifications; ``None`` without notifications."""
        return worst_of(self.states)

    def __iter__(self) -> Iterator[TreeNode]:
        """Iterate over this node and all nodes below it."""
        yield self
        for child in self.children:
            yield from child


class EventTree(Struct, frozen=True, kw_only=True):
    """The events of a chain of causation, from the first event down.

    Example::

        tree = await outbox.admin.tree(event_id)
        for node in tree.root:
            print("  " * node.event.hops, node.event.event_type, node.worst)
    """

    event_id: UUID
    """The requested event."""
    root: TreeNode
    """The first event of the chain that is still stored."""
    number: int
    """The number of events in the tree."""
    is_complete: bool
    """False if the chain has more events than the tree shows."""
    is_purged_above: bool
    """True if the root has a cause that is no longer stored."""
