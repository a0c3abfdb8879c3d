"""The memory of outcomes that the database refused."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from outboxio.model.event import EventRecord
from outboxio.model.notification import SUCCEEDED, Notification
from outboxio.model.outcome import Lease, Outcome, success
from outboxio.runs.run import BYTES_EACH, RefusedOutcomes, Run
from outboxio.support.clock import as_micros

NOON = as_micros(datetime(2026, 1, 1, 12))
LEASE = Lease("app/dispatch/mail", "mail", 3)


def row(number: int = 1, **changes: Any) -> Notification:
    found = Notification(UUID(int=number), "mail", "Opened", "{}", "PENDING", 0, NOON, NOON, number, 0, None)
    return msgspec.structs.replace(found, **changes)


def run(found: Notification) -> Run:
    queue: Any = None
    return Run(found, queue, LEASE)


def test_an_unchanged_row_gets_the_outcome_of_its_refused_run() -> None:
    refused = RefusedOutcomes()
    refused.remember(run(row()), success(row(), LEASE), LEASE.term)
    found = refused.of(row())
    assert found is not None
    another = Lease("app/dispatch/mail", "mail", 5)
    assert found.under(another) == Outcome(UUID(int=1), another, SUCCEEDED, 1)
    assert refused.of(row(2)) is None


def test_the_outcome_of_a_changed_row_is_forgotten() -> None:
    for changes in ({"attempts": 1}, {"state": "FAILED"}, {"next_retry_us": NOON + 1}):
        refused = RefusedOutcomes()
        refused.remember(run(row()), success(row(), LEASE), LEASE.term)
        assert refused.of(row(**changes)) is None
        assert len(refused) == 0


def test_a_run_that_may_start_only_once_has_left_its_mark() -> None:
    refused, started = RefusedOutcomes(), run(row(state="FAILED"))
    started.has_begun = True
    refused.remember(started, success(row(), LEASE), LEASE.term)
    assert refused.of(row(attempts=1)) is not None


def test_the_refused_lease_is_recognized() -> None:
    refused, lease = RefusedOutcomes(), Lease("app/dispatch/mail", "mail", 3)
    refused.remember(run(row()), success(row(), lease), 3)
    found = refused.of(row())
    assert found is not None
    assert found.was_under(lease)
    lease.term = 4  # reacquired, with no other holder in between
    assert not found.was_under(lease)


def test_the_oldest_outcomes_are_forgotten_first() -> None:
    refused = RefusedOutcomes(most_bytes=10 * BYTES_EACH)
    for number in range(1, 16):
        refused.remember(run(row(number)), success(row(number), LEASE), LEASE.term)
    assert len(refused) == 10
    assert refused.of(row(5)) is None
    assert refused.of(row(6)) is not None

    large = success(row(16), LEASE)
    action: Any = None
    large.emitted = (action, [EventRecord(id=UUID(int=99), payload="x" * 6 * BYTES_EACH)])
    refused.remember(run(row(16)), large, LEASE.term)
    assert len(refused) == 3, "what a handler has emitted counts as well"


def test_an_outcome_refused_twice_is_remembered_once() -> None:
    refused = RefusedOutcomes(most_bytes=2 * BYTES_EACH)
    for term in range(5):
        refused.remember(run(row()), success(row(), LEASE), term)
    refused.remember(run(row(2)), success(row(2), LEASE), 1)
    assert len(refused) == 2
    refused.forget(UUID(int=1))
    assert len(refused) == 1
