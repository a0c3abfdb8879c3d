"""The protocol between an outbox and telemetry (decision 36).

The methods of all classes here do nothing. An outbox without telemetry uses :data:`NO_TELEMETRY`, and telemetry
overrides some of the methods. Values are passed unprocessed: text is not formatted, and JSON not decoded, unless
telemetry does so. Handlers import this module, so :class:`CalledHandler` declares the attributes of a handler that
telemetry uses.

An outbox uses the telemetry passed to it and that of the whole process. An integration for the process, such as
Sentry's, may be enabled before or after an outbox is created, so each part of an outbox reads the current choice when
it starts to work.

Headers carry a trace from the writer of an event to its handlers, and from a handler to the events it emits.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast
from weakref import WeakSet

import msgspec

from outboxio.errors import ConfigurationError
from outboxio.support.codec import decode_object
from outboxio.support.text import briefly

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
    """The handler options that affect its spans."""

    @property
    def trace(self) -> bool: ...

    @property
    def delivery(self) -> str: ...


class CalledHandler(Protocol):
    """The attributes of a handler that telemetry uses."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> CalledOptions: ...


class Watched:
    """A context manager around observed work. It never suppresses an error."""

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
        """Called when a run has failed and the action is repeated."""

    def was_duplicate(self) -> None:
        """Called when nothing was written, because the inbox message was received before."""


class Sending(Watched):
    """The writing of an action's events."""

    __slots__ = ()

    def marked(self, action: ActionRecord) -> ActionRecord:
        """Return the action with headers that let handlers in any process continue the trace."""
        return action


class Call(Watched):
    """A call of a handler for an event or a batch, or of the hooks of a DYING row."""

    __slots__ = ()

    def ended(self, outcome: Outcome | None) -> None:
        """Called for each row of the call; ``outcome`` is ``None`` if the row has no outcome and runs again."""

    def raised(self, error: BaseException) -> None:
        """Called when a run of ``inbox.consume`` has failed. The message has no row and no outcome yet."""


class JobCall(Watched):
    """A run of a job."""

    __slots__ = ()

    def ended(self, result: JobResult, error: BaseException | None, redact: Redact) -> None:
        """Called when the result of the run is recorded, unless another process has taken over the run."""


EXECUTION, SENDING, CALL, JOB_CALL = Execution(), Sending(), Call(), JobCall()
"""The context managers for work that is not observed."""


class HandlingTelemetry:
    """Telemetry for the handlers of a shard during a shard run."""

    only_sampled = False
    """If True, called only for events whose ``traceparent`` belongs to a sampled trace."""

    def begin(self) -> None:
        """Called in the context in which all tasks that call handlers are created."""

    def call(self, handler: CalledHandler, row: Notification) -> Call | None:
        """Surround the call of a handler, or of the hooks if the row is DYING; return ``None`` to ignore it."""
        return None

    def batch_call(self, handler: CalledHandler, rows: Sequence[Notification]) -> Call | None:
        """Surround the call of a batch handler; return ``None`` to ignore it."""
        return None

    def failed(
        self, handler: CalledHandler, row: Notification, error: BaseException, outcome: Outcome, redact: Redact
    ) -> None:
        """Called when a failed run has an outcome, inside the surrounding call if there is one."""


class Telemetry:
    """The callbacks of an outbox for telemetry: pass an object of a subclass as ``Outbox(telemetry=...)``."""

    def attached(self, outbox: Any) -> None:
        """Called when an ``Outbox`` was created. Metrics may now read ``outbox.statistics`` in any thread."""

    def executing(
        self, namespace: str, shard: str, action_name: str, headers: Mapping[str, Any] | None, *, joins: bool = False
    ) -> Execution:
        """Surround the execution of an action. ``joins``: it runs in the open transaction of a handler."""
        return EXECUTION

    def sending(self, shard: str, action: ActionRecord, events: Sequence[EventRecord]) -> Sending:
        """Surround the write of an action's events; without events, of its sentinel event, which has no type."""
        return SENDING

    def handling(self, namespace: str, shard: str, clock: Clock, *, inline: bool) -> HandlingTelemetry | None:
        """Called when a shard starts to run handlers; return ``None`` to ignore all. ``inline``: ``inbox.consume``."""
        return None

    def job(self, namespace: str, shard: str, name: str, scheduled_at: datetime, attempt: int) -> JobCall:
        """Surround a run of a job. ``scheduled_at``: the scheduled time, naive UTC. ``attempt``: 1 for the first."""
        return JOB_CALL

    def yields_to(self, given: Telemetry) -> bool:
        """Return True if this process-wide telemetry is redundant for an outbox with the telemetry ``given``."""
        return False

    def round(self, kind: RoundKind, run_once: Round, *, namespace: str, shard: str) -> Round:
        """Wrap the rounds of a service."""
        return run_once


NO_TELEMETRY = Telemetry()


AnyTelemetry = Telemetry | Sequence[Telemetry]


class TelemetryChoice:
    """Holds the telemetry of an outbox in :attr:`chosen`; :data:`NO_TELEMETRY` if there is none."""

    def __init__(self, given: AnyTelemetry | None = None) -> None:
        self._given = _checked(given)
        self.chosen: Telemetry = NO_TELEMETRY
        self.choose()
        _choices.add(self)

    def choose(self) -> None:
        """Update the choice after the process-wide telemetry has changed."""
        of_process = [each for each in _of_process if not any(each.yields_to(given) for given in self._given)]
        match [*self._given, *of_process]:
            case []:
                self.chosen = NO_TELEMETRY
            case [one]:
                self.chosen = one
            case several:
                self.chosen = Several(several)


_of_process: list[Telemetry] = []
_choices: WeakSet[TelemetryChoice] = WeakSet()


def use_in_process(telemetry: Telemetry) -> None:
    """Use this telemetry for all outboxes of the process, including existing ones."""
    _of_process.append(telemetry)
    _choose_again()


def remove_from_process(telemetry: Telemetry) -> None:
    """Undo :func:`use_in_process`."""
    _of_process.remove(telemetry)
    _choose_again()


def _choose_again() -> None:
    for choice in tuple(_choices):
        choice.choose()


def _checked(given: object) -> Sequence[Telemetry]:
    if given is None:
        return ()
    several: Any = [given] if isinstance(given, Telemetry) else given
    if not isinstance(several, Sequence) or not all(isinstance(one, Telemetry) for one in cast(Iterable[Any], several)):
        raise ConfigurationError(
            f"telemetry of the outbox is {briefly(given)}; expected an object of a subclass of "
            "outboxio.telemetry.Telemetry, such as OpenTelemetry() of outboxio.integrations.opentelemetry, or a list"
        )
    return cast(Sequence[Telemetry], several)


class _All(Watched):
    """Surrounds work with several telemetry objects."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for part in self._parts:
            self._stack.enter_context(part)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


class _Execution(_All, Execution):
    def repeated(self) -> None:
        for part in self._parts:
            part.repeated()

    def was_duplicate(self) -> None:
        for part in self._parts:
            part.was_duplicate()


class _Sending(_All, Sending):
    def marked(self, action: ActionRecord) -> ActionRecord:
        for part in self._parts:
            action = part.marked(action)
        return action


class _Call(_All, Call):
    def ended(self, outcome: Outcome | None) -> None:
        for part in self._parts:
            part.ended(outcome)

    def raised(self, error: BaseException) -> None:
        for part in self._parts:
            part.raised(error)


class _JobCall(_All, JobCall):
    def ended(self, result: JobResult, error: BaseException | None, redact: Redact) -> None:
        for part in self._parts:
            part.ended(result, error, redact)


class Several(Telemetry):
    """Combines several telemetry objects, each nested in the previous one."""

    def __init__(self, parts: Sequence[Telemetry]) -> None:
        self._parts = parts

    def attached(self, outbox: Any) -> None:
        for part in self._parts:
            part.attached(outbox)

    def executing(
        self, namespace: str, shard: str, action_name: str, headers: Mapping[str, Any] | None, *, joins: bool = False
    ) -> Execution:
        return _Execution([p.executing(namespace, shard, action_name, headers, joins=joins) for p in self._parts])

    def sending(self, shard: str, action: ActionRecord, events: Sequence[EventRecord]) -> Sending:
        return _Sending([p.sending(shard, action, events) for p in self._parts])

    def handling(self, namespace: str, shard: str, clock: Clock, *, inline: bool) -> HandlingTelemetry | None:
        handling = [p.handling(namespace, shard, clock, inline=inline) for p in self._parts]
        present = [each for each in handling if each is not None]
        return _Handling(present) if present else None

    def job(self, namespace: str, shard: str, name: str, scheduled_at: datetime, attempt: int) -> JobCall:
        return _JobCall([part.job(namespace, shard, name, scheduled_at, attempt) for part in self._parts])

    def round(self, kind: RoundKind, run_once: Round, *, namespace: str, shard: str) -> Round:
        for part in reversed(self._parts):
            run_once = part.round(kind, run_once, namespace=namespace, shard=shard)
        return run_once


class _Handling(HandlingTelemetry):
    def __init__(self, parts: Sequence[HandlingTelemetry]) -> None:
        self._parts = parts
        self.only_sampled = all(part.only_sampled for part in parts)

    def begin(self) -> None:
        for part in self._parts:
            part.begin()

    def call(self, handler: CalledHandler, row: Notification) -> Call | None:
        return _together([part.call(handler, row) for part in self._parts])

    def batch_call(self, handler: CalledHandler, rows: Sequence[Notification]) -> Call | None:
        return _together([part.batch_call(handler, rows) for part in self._parts])

    def failed(
        self, handler: CalledHandler, row: Notification, error: BaseException, outcome: Outcome, redact: Redact
    ) -> None:
        for part in self._parts:
            part.failed(handler, row, error, outcome, redact)


def _together(calls: Sequence[Call | None]) -> Call | None:
    present = [call for call in calls if call is not None]
    return _Call(present) if present else None


TRACE_HEADERS = ("traceparent", "tracestate", "baggage", "sentry-trace")
"""The headers that emitted events inherit from the event being handled. Other headers are not inherited."""

# Matches from the name to the last digit of the flags. The quotes between name and value may be escaped, because the
# headers of a row may be a JSON string. Character classes instead of dots would take twice as long.
_SAMPLED = r"traceparent[^-]{3,9}-.{51}[13579bdf]"
sampled_in_text = re.compile(_SAMPLED).search
sampled_in_bytes = re.compile(_SAMPLED.encode()).search
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def headers_in(raw: bytes | msgspec.Raw) -> dict[str, Any]:
    """Return the headers of a row. Headers that are not a JSON object are ignored."""
    try:
        return decode_object(raw)
    except Exception:
        return {}


def carried(headers: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of a row that events emitted by its handler inherit."""
    return {name: headers[name] for name in TRACE_HEADERS if isinstance(headers.get(name), str)}


def with_trace(headers: str | None, trace: Mapping[str, str], instead_of: Collection[str]) -> str | None:
    """Return the headers of an action as JSON, with the headers ``instead_of`` replaced by those of a trace."""
    kept = {} if headers is None else _decode(headers)
    merged = {name: value for name, value in kept.items() if name not in instead_of} | dict(trace)
    return msgspec.json.encode(merged).decode() if merged else None
