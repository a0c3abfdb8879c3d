"""Runs: the phases of a run, and the spec of a handler."""

from __future__ import annotations

import msgspec
import pytest

from outboxio.handlers.options import Batch
from outboxio.model.outcome import Lease
from outboxio.runs.run import INTERRUPTED, OVERDUE, RUNNING, STUCK, Run
from outboxio.settings import Settings
from tests.kit.dispatching import queue_of, row_of


def test_a_run_is_overdue_then_stuck_or_interrupted() -> None:
    run = Run(row_of(1), queue_of(), Lease("lease", "h", 1))
    assert (run.phase, run.interrupted, run.abandoned) == (RUNNING, False, False)
    run.exceed_deadline(12.5)
    assert (run.phase, run.cancelled_at) == (OVERDUE, 12.5)
    run.abandon()
    assert (run.phase, run.abandoned, run.interrupted) == (STUCK, True, False)

    other = Run(row_of(2), queue_of(), Lease("lease", "h", 1))
    other.exceed_deadline(12.5)
    other.interrupt()
    assert (other.phase, other.cancelled_at, other.interrupted) == (INTERRUPTED, 0.0, True)


def test_the_next_part_of_a_call_runs_like_the_first() -> None:
    run = Run(row_of(1), queue_of(), Lease("lease", "h", 1))
    run.exceed_deadline(12.5)
    run.resume()
    assert (run.phase, run.cancelled_at) == (RUNNING, None)


def test_a_worker_stops_after_a_phase_above_overdue() -> None:
    assert [phase > OVERDUE for phase in (RUNNING, OVERDUE, INTERRUPTED, STUCK)] == [False, False, True, True]


def test_a_spec_is_immutable() -> None:
    spec = queue_of().spec
    with pytest.raises(AttributeError):
        spec.limit = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (16, 4, 1)),
        ({"concurrency": 3}, (3, 3, 1)),
        ({"concurrency": 100}, (16, 4, 1)),
        ({"batch": Batch(size=50)}, (1, 1, 50)),
    ],
)
def test_the_workers_of_a_handler_follow_its_options_and_settings(
    options: dict[str, object], expected: tuple[int, int, int]
) -> None:
    spec = queue_of(settings=Settings(concurrency=16), handlers=2, **options).spec
    assert (spec.limit, spec.share, spec.per_call) == expected


def test_an_ordered_handler_needs_admission() -> None:
    assert queue_of(ordered=True).spec.needs_admission
    assert queue_of(strict=frozenset({"Opened"})).spec.needs_admission
    assert not queue_of().spec.needs_admission


def test_a_quick_handler_reads_further_ahead_and_a_slow_one_less() -> None:
    ahead = queue_of(settings=Settings(handling_batch_size=1000)).ahead
    first = ahead.window
    ahead.adapt(10.0)
    ahead.was_full = True
    ahead.adapt(10.1)
    assert ahead.window == 2 * first
    ahead.adapt(20.0)
    assert ahead.window == first


def test_a_watched_plain_handler_is_no_longer_plain() -> None:
    queue = queue_of()
    assert queue.is_plain
    queue.watch(is_watched=True)
    assert not queue.is_plain
    assert msgspec.structs.asdict(queue.spec)["timeout"] == queue.spec.timeout
