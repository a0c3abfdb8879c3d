"""A claim in isolation: rows of another process are skipped, and the others are finished by attempts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast
from uuid import UUID

import pytest

from outboxio import State
from outboxio.model.notification import Notification
from outboxio.model.outcome import NO_LEASE
from outboxio.runs.opening import STARTABLE, RowClaimer, TakenByAnother, WorkResult
from outboxio.runs.run import Run
from outboxio.statistics.figures import Counters
from outboxio.support.clock import ShardClock

NOW = datetime(2030, 1, 1, 12)


class Session:
    """Locks the rows of ``free``, and remembers the rows that are finished."""

    def __init__(self, free: set[int]) -> None:
        self._free = free
        self.finished: list[tuple[list[int], State, int]] = []

    async def claim(self, ids: Sequence[UUID], states: Sequence[State]) -> dict[UUID, str]:
        assert list(ids) == sorted(ids)
        assert states == STARTABLE
        return {id: "[]" for id in ids if id.int in self._free}

    async def finish(self, ids: Sequence[UUID], state: State, attempts: int, now: datetime) -> None:
        self.finished.append(([id.int for id in ids], state, attempts))


def run(number: int, attempts: int = 0) -> Run:
    row = Notification(UUID(int=number), "h", "E", "{}", State.PENDING, attempts, 0, 0, 0, 0, None)
    return Run(row, cast(Any, None), NO_LEASE)


def claim_of(counters: Counters) -> RowClaimer:
    classifier: Any = lambda run, cause: cause  # noqa: E731  # returns its argument
    return RowClaimer(classifier, counters, ShardClock(lambda: NOW))


async def test_rows_of_another_process_are_skipped_and_counted() -> None:
    counters, rows = Counters(), [run(3), run(1), run(2)]
    envelopes: dict[Run, Any] = {row: row.notification.id for row in rows}

    claimed = await claim_of(counters).take(cast(Any, Session({1, 3})), rows[0], envelopes, STARTABLE)

    assert [row.notification.id.int for row in claimed] == [3, 1]
    assert counters.refused == 1


async def test_a_run_without_a_free_row_is_claimed_by_another_process() -> None:
    counters, row = Counters(), run(1)

    with pytest.raises(TakenByAnother):
        await claim_of(counters).take(cast(Any, Session(set())), row, {row: cast(Any, None)}, STARTABLE)

    assert counters.refused == 0  # the end of the run counts it


async def test_rows_that_did_not_fail_are_finished_together_by_attempts() -> None:
    session, rows = Session(set()), [run(4), run(2, 1), run(1), run(3)]
    result = WorkResult(State.SUCCEEDED, 1, {rows[3]: ValueError("no")})

    await claim_of(Counters()).finish(cast(Any, session), rows, result)

    assert session.finished == [([1, 4], State.SUCCEEDED, 1), ([2], State.SUCCEEDED, 2)]


def test_a_failed_run_needs_a_cause_to_have_an_outcome() -> None:
    claim, error = claim_of(Counters()), ValueError("no")

    assert cast(Any, claim.failed(run(1), error, error)) is error
    assert claim.failed(run(1), error, None) is None
