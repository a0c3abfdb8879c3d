"""The protocol between an outbox and telemetry (decision 36).

Every class here is complete, and does nothing: an outbox without telemetry uses :data:`NO_TELEMETRY`, and telemetry
overrides some of the methods. Values are given as they are: no text is made and no JSON is decoded for telemetry that
does not ask. Telemetry is imported by the outbox and its handlers, so :class:`CalledHandler` names what it reads
of a handler.

Which telemetry an outbox has: the given one, and the one of the whole process.

Integrations that are switched on for a process, such as Sentry's, may be switched on before or after an outbox is made.
So each part of an outbox that begins a piece of work reads the choice, which is one attribute.

Headers that carry a trace from the writer of an event to the handlers, and from a handler to the events it emits.
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


AnyTelemetry = Telemetry | Sequence[Telemetry]


class TelemetryChoice:
    """The telemetry of an outbox. The attribute :attr:`chosen` is always there: :data:`NO_TELEMETRY` does nothing."""

    def __init__(self, given: AnyTelemetry | None = None) -> None:
        self._given = _checked(given)
        self.chosen: Telemetry = NO_TELEMETRY
        self.choose()
        _choices.add(self)

    def choose(self) -> None:
        """Choose again: the telemetry of the process has changed."""
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
    """Tell this telemetry of every outbox of the process, of those that exist as well."""
    _of_process.append(telemetry)
    _choose_again()


def use_no_more(telemetry: Telemetry) -> None:
    """The end of :func:`use_in_process`."""
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
    """Surrounds work with several others."""

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
    """Several telemetries as one, each inside of the one before."""

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

    def job(self, namespace: str, shard: str, name: str, moment: datetime, attempt: int) -> JobCall:
        return _JobCall([part.job(namespace, shard, name, moment, attempt) for part in self._parts])

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
"""The headers that an event of a handler takes from the handler's event. Other headers are not passed on."""

# From the name to the last digit of the flags. Quotes between name and value may be escaped, because the headers of a
# row may be a text in JSON. Character classes instead of the dots would take twice the time.
_SAMPLED = r"traceparent[^-]{3,9}-.{51}[13579bdf]"
sampled_in_text = re.compile(_SAMPLED).search
sampled_in_bytes = re.compile(_SAMPLED.encode()).search
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def headers_in(raw: bytes | msgspec.Raw) -> dict[str, Any]:
    """The headers of a row. Headers that are no JSON object, written by a different tool, count as no headers."""
    try:
        return decode_object(raw)
    except Exception:
        return {}


def carried(headers: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a row that the events of its handler take over."""
    return {name: headers[name] for name in TRACE_HEADERS if isinstance(headers.get(name), str)}


def with_trace(headers: str | None, trace: Mapping[str, str], instead_of: Collection[str]) -> str | None:
    """The headers of an action, as JSON, with the headers of a trace in place of those that the action has."""
    kept = {} if headers is None else _decode(headers)
    merged = {name: value for name, value in kept.items() if name not in instead_of} | dict(trace)
    return msgspec.json.encode(merged).decode() if merged else None
