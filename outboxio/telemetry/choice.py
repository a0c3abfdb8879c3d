"""Which telemetry an outbox has: the given one, and the one of the whole process.

Integrations that are switched on for a process, such as Sentry's, may be switched on before or after an outbox is made.
So each part of an outbox that begins a piece of work reads the choice, which is one attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import WeakSet

from outboxio.errors import ConfigurationError
from outboxio.support.text import briefly
from outboxio.telemetry.protocol import (
    NO_TELEMETRY,
    Call,
    CalledHandler,
    Execution,
    HandlingTelemetry,
    JobCall,
    Round,
    RoundKind,
    Sending,
    Telemetry,
    Watched,
)

if TYPE_CHECKING:
    from datetime import datetime

    from outboxio.model.event import ActionRecord, EventRecord
    from outboxio.model.notification import Notification
    from outboxio.model.operating.operation import JobResult
    from outboxio.model.outcome import Outcome
    from outboxio.model.redaction import Redact
    from outboxio.support.clock import Clock

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
