"""Claims: how a run in a transaction makes sure that no second run handles the event, at once or later.

Dispatch locks the notification in the handler's transaction (``RowClaim``). ``inbox.consume`` has no notification, and
writes a row of ``consumed_events`` instead (``inbox/inline.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from msgspec import Struct

from outboxio.invocation.judge import Judge
from outboxio.model.envelope import EventEnvelope
from outboxio.model.notification import DYING, State
from outboxio.model.outcome import Outcome, verdict_of
from outboxio.runs.run import Run
from outboxio.statistics.figures import Counters
from outboxio.storage.protocols import Session
from outboxio.support.clock import ShardClock

Envelope = EventEnvelope[Any]

STARTABLE = (State.PENDING, State.FAILED)
"""The states in which a notification can be claimed for the handler."""


class TakenByAnother(Exception):
    """A second process works on the event, or has settled the event: this run has no outcome."""


class WorkResult(Struct, frozen=True):
    """The end of the work in a transaction: the new state of all rows but the failed rows."""

    state: State
    attempts_more: int
    failed: Mapping[Run, BaseException] = {}


class Claim(Protocol):
    """Claims the events of a run in a transaction, and answers for a run that fails."""

    async def take(
        self, session: Session, run: Run, envelopes: Mapping[Run, Envelope], states: Sequence[State]
    ) -> dict[Run, Envelope]:
        """Claim in an open transaction; the envelopes that are claimed. :class:`TakenByAnother` if there are none."""
        ...

    async def finish(self, session: Session, claimed: Iterable[Run], ended: WorkResult) -> None:
        """Write in the same transaction that the claimed rows are done."""
        ...

    def failed(self, run: Run, error: BaseException, cause: BaseException | None) -> Outcome | None:
        """The outcome of a run that raised ``error``, judged by ``cause``; ``None`` if the run has no outcome."""
        ...


class RowClaim:
    """Locks the notifications of a run. A row that a second process has locked or settled is left out and counted."""

    def __init__(self, judge: Judge, counters: Counters, clock: ShardClock) -> None:
        self._judge = judge
        self._counters = counters
        self._clock = clock

    async def take(
        self, session: Session, run: Run, envelopes: Mapping[Run, Envelope], states: Sequence[State]
    ) -> dict[Run, Envelope]:
        errors = await session.claim(sorted(row.notification.id for row in envelopes), states)
        claimed = {row: envelope for row, envelope in envelopes.items() if row.notification.id in errors}
        if not claimed:
            raise TakenByAnother
        self._counters.refused += len(envelopes) - len(claimed)
        if states == (DYING,):
            run.verdict = verdict_of(errors[run.notification.id])
        return claimed

    async def finish(self, session: Session, claimed: Iterable[Run], ended: WorkResult) -> None:
        def attempts(row: Run) -> int:
            return row.notification.attempts + ended.attempts_more

        rows = sorted((row for row in claimed if row not in ended.failed), key=attempts)
        for number, some in groupby(rows, key=attempts):
            await session.finish(sorted(row.notification.id for row in some), ended.state, number, self._clock())

    def failed(self, run: Run, error: BaseException, cause: BaseException | None) -> Outcome | None:
        return None if cause is None else self._judge(run, cause)
