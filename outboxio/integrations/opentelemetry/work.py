"""Work that is covered by a span."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from outboxio.errors import CommitUnknown
from outboxio.integrations.opentelemetry import names
from outboxio.model.notification import State
from outboxio.model.operating.operation import JobResult
from outboxio.model.outcome import Outcome
from outboxio.model.redaction import Description, Redact
from outboxio.support.log import type_name
from outboxio.telemetry.protocol import Call, Execution, JobCall, Watched

Attributes = dict[str, str | int]


class Spanned(Watched):
    """A span that is current while the work runs, and ends with it."""

    def __init__(self, span: trace.Span, parent: contexts.Context | None = None) -> None:
        """``parent``: the context around the work; by default the current context."""
        self.span = span
        self.context = trace.set_span_in_context(span, parent)

    def __enter__(self) -> Self:
        self._token = contexts.attach(self.context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, GeneratorExit):
            contexts.detach(self._token)
        # A coroutine that is closed together with the event loop may run in a different context.
        if self.span.is_recording():
            self.describe(error)
        self.span.end()

    def describe(self, error: BaseException | None) -> None:
        """Set the attributes that are known at the end."""
        if error is not None:
            self.fail(type_name(error))

    def fail(self, error_type: str, message: str | None = None) -> None:
        self.span.set_attribute(names.ERROR_TYPE, error_type)
        self.span.set_status(Status(StatusCode.ERROR, message))


class SpannedExecution(Spanned, Execution):
    """``execute``: an action with all its runs."""

    def __init__(self, span: trace.Span, parent: contexts.Context | None, *, joins: bool) -> None:
        super().__init__(span, parent)
        self._attempts = 1
        self._outcome = names.JOINED if joins else names.COMMITTED

    def repeated(self) -> None:
        self._attempts += 1

    def was_duplicate(self) -> None:
        self._outcome = names.DUPLICATE

    def describe(self, error: BaseException | None) -> None:
        if error is not None:
            is_unknown = issubclass(type(error), CommitUnknown)
            self._outcome = names.UNKNOWN if is_unknown else names.REFUSED
            self.fail(type_name(error))
        self.span.set_attribute(names.ATTEMPTS, self._attempts)
        self.span.set_attribute(names.OUTCOME, self._outcome)


class SpannedCall(Spanned, Call):
    """``process`` and ``on_dead``: a call of a handler or of hooks. A batch has the worst outcome of its rows."""

    def __init__(self, span: trace.Span, parent: contexts.Context | None, *, is_hook: bool = False) -> None:
        super().__init__(span, parent)
        self._is_hook = is_hook
        self._worst = -1
        self._outcome: Outcome | None = None
        self._raised: str | None = None

    def ended(self, outcome: Outcome | None) -> None:
        if not self.span.is_recording():
            return
        if (rank := _RANKS.index(_name_of(outcome, is_hook=self._is_hook))) > self._worst:
            self._worst, self._outcome = rank, outcome

    def raised(self, error: BaseException) -> None:
        self._raised = type_name(error)

    def describe(self, error: BaseException | None) -> None:
        if self._raised is not None:
            self.span.set_attribute(names.OUTCOME, names.FAILED)
            self.fail(self._raised)
            return
        name = names.CUT_SHORT if self._worst < 0 else _RANKS[self._worst]
        self.span.set_attribute(names.OUTCOME, name)
        outcome = self._outcome
        if outcome is None or outcome.error is None:
            return
        entry = _decode(outcome.error)
        if name == names.RETRY and outcome.next_retry_at is not None:
            self.span.set_attribute(names.RETRY_AT, f"{outcome.next_retry_at.isoformat(timespec='milliseconds')}Z")
        self.fail(entry.type, f"{entry.type}: {entry.message}")


class SpannedJob(Spanned, JobCall):
    """``job``: a run of a job. A run that was taken over by a different process has the outcome ``cut_short``."""

    def __init__(self, span: trace.Span) -> None:
        super().__init__(span, contexts.Context())
        self._result = names.CUT_SHORT
        self._error: Description | None = None

    def ended(self, result: JobResult, error: BaseException | None, redact: Redact) -> None:
        self._result = result.lower()
        self._error = None if error is None else Description.of(error, redact)

    def describe(self, error: BaseException | None) -> None:
        self.span.set_attribute(names.OUTCOME, self._result)
        if self._error is not None:
            self.fail(self._error.type, f"{self._error.type}: {self._error.message}")


class _Entry(Struct):
    """The parts of an outcome's error that a span shows. The texts are redacted already."""

    type: str = ""
    message: str = ""
    verdict: str | None = None


_decode = msgspec.json.Decoder(_Entry, strict=False).decode
_RANKS = (names.SUCCEEDED, names.CUT_SHORT, names.RETRY, names.EXPIRED, names.DEAD)
_BY_STATE = {
    State.SUCCEEDED: names.SUCCEEDED,
    State.FAILED: names.RETRY,
    State.DEAD: names.DEAD,
    State.EXPIRED: names.EXPIRED,
}


def _name_of(outcome: Outcome | None, *, is_hook: bool) -> str:
    if outcome is None:
        return names.CUT_SHORT
    if outcome.state is not State.DYING:
        return _BY_STATE.get(outcome.state, names.CUT_SHORT)
    if is_hook:
        return names.RETRY
    # The outcome is decided, but the hook has not run yet.
    entry = _decode(outcome.error or "{}")
    return _BY_STATE.get(State(entry.verdict), names.DEAD) if entry.verdict else names.DEAD
