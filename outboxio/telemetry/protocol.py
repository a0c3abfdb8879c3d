"""The protocol between an outbox and telemetry (decision 36).

Every class here is complete, and does nothing: an outbox without telemetry uses :data:`NO_TELEMETRY`, and telemetry
overrides some of the methods. Values are given as they are: no text is made and no JSON is decoded for telemetry that
does not ask. Telemetry stands below the outbox and its handlers, so it sees of a handler
what :class:`CalledHandler` names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    from datetime import datetime

    from outboxio.loops.loop import RoundResult
    from outboxio.model.event import ActionRecord, EventRecord
    from outboxio.model.notification import Notification
    from outboxio.model.operating.operation import JobResult
    from outboxio.model.outcome import Outcome
    from outboxio.model.redaction import Redact
    from outboxio.support.clock import Clock

Round = Callable[[], Awaitable["RoundResult"]]
RoundKind = Literal["fanout", "settle", "purge"]


class CalledOptions(Protocol):
    """The options of a handler that concern its spans."""

    @property
    def trace(self) -> bool: ...

    @property
    def delivery(self) -> str: ...


class CalledHandler(Protocol):
    """A handler, as telemetry sees it."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> CalledOptions: ...


class Watched:
    """A piece of work that telemetry surrounds. Leaving never swallows an error."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Execution(Watched):
    """The execution of an action, with all its runs."""

    __slots__ = ()

    def repeated(self) -> None:
        """The last run has failed, and the action is run again."""

    def was_duplicate(self) -> None:
        """Nothing was written: the inbox message was received before."""


class Sending(Watched):
    """The writing of an action's events."""

    __slots__ = ()

    def marked(self, action: ActionRecord) -> ActionRecord:
        """The action with the headers by which handlers, in any process, continue the trace."""
        return action


class Call(Watched):
    """A call of a handler for an event or a batch, or of the hooks for a verdict."""

    __slots__ = ()

    def ended(self, outcome: Outcome | None) -> None:
        """A row of the call has this outcome; ``None`` if the row has no outcome, and runs again."""

    def raised(self, error: BaseException) -> None:
        """The call of ``inbox.consume`` has failed: the message has no row yet, and the verdict comes later."""


class JobCall(Watched):
    """A run of a job."""

    __slots__ = ()

    def ended(self, result: JobResult, error: BaseException | None, redact: Redact) -> None:
        """The end of the run is recorded. A run without an end was taken over by a different process."""


EXECUTION, SENDING, CALL, JOB_CALL = Execution(), Sending(), Call(), JobCall()
"""Work that no telemetry surrounds."""


class HandlingTelemetry:
    """Telemetry for the handlers of a shard, from the beginning of a shard run on."""

    only_sampled = False
    """True to be asked only about calls for events that seem to belong to a sampled trace, by ``traceparent``."""

    def begin(self) -> None:
        """The context begins from which all tasks that call handlers are made."""

    def call(self, handler: CalledHandler, row: Notification) -> Call | None:
        """The call of a handler for an event, or of the hooks if the row is DYING; ``None`` to leave it alone."""
        return None

    def batch_call(self, handler: CalledHandler, rows: Sequence[Notification]) -> Call | None:
        """The call of a batch handler; ``None`` to leave it alone."""
        return None

    def failed(
        self, handler: CalledHandler, row: Notification, error: BaseException, outcome: Outcome, redact: Redact
    ) -> None:
        """A run has failed, and was judged. Called inside of the surrounding call, if there is one."""


class Telemetry:
    """What an outbox tells telemetry: give an object of a subclass as ``Outbox(telemetry=...)``."""

    def attached(self, outbox: Any) -> None:
        """An ``Outbox`` was made with this telemetry. Metrics may read ``outbox.statistics`` now, in any thread."""

    def executing(
        self, namespace: str, shard: str, action_name: str, headers: Mapping[str, Any] | None, *, joins: bool = False
    ) -> Execution:
        """An action is executed. ``joins``: in the open transaction of a handler, which commits the action."""
        return EXECUTION

    def sending(self, shard: str, action: ActionRecord, events: Sequence[EventRecord]) -> Sending:
        """The events of an action are written. An action without events has a sentinel event, without a type."""
        return SENDING

    def handling(self, namespace: str, shard: str, clock: Clock, *, inline: bool) -> HandlingTelemetry | None:
        """A shard begins to run handlers; ``None`` to leave every run alone. ``inline``: for ``inbox.consume``."""
        return None

    def job(self, namespace: str, shard: str, name: str, moment: datetime, attempt: int) -> JobCall:
        """A job runs. ``moment``: of the schedule, naive UTC. ``attempt``: 1 for the first run of a moment."""
        return JOB_CALL

    def yields_to(self, given: Telemetry) -> bool:
        """True for telemetry of the whole process that an outbox with the telemetry ``given`` does not need."""
        return False

    def round(self, kind: RoundKind, run_once: Round, *, namespace: str, shard: str) -> Round:
        """The rounds of a service."""
        return run_once


NO_TELEMETRY = Telemetry()
