"""Events reach another database through a broker, each once and in order, whichever process is killed.

``OUTBOXIO_TEST_BROKER_EVENTS=50000 OUTBOXIO_TEST_FULL_SIZE=1 pytest tests/brokers/test_broker_course.py -s`` runs the
full size, and prints the results.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kit.broker_course import Course, Plan, violations
from tests.kit.broker_kinds import KINDS

EVENTS = int(os.environ.get("OUTBOXIO_TEST_BROKER_EVENTS", "1000"))


@pytest.mark.timeout(600)  # RabbitMQ needs some seconds for each start, and more on a busy machine
@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_each_event_arrives_once_and_in_order_despite_kills(
    kind: str, postgres_url: str, second_url: str, tmp_path: Path
) -> None:
    plan = Plan(events=EVENTS, keys=max(50, EVENTS // 100), longest=500 if EVENTS <= 2000 else 3600)
    report = await Course(kind, tmp_path, (postgres_url, second_url), plan).run()
    print(f"\n{kind}: {EVENTS} events in {report.seconds:.1f} s; {'; '.join(report.steps)}")
    assert report.violations == []
    assert len(report.steps) == 7


SENT = [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (SENT, []),
        ([("b", 0), ("b", 1), ("a", 0), ("a", 1), ("a", 2)], []),  # there is no order between keys
        (SENT[:-1], ["a: lost [2]"]),
        ([*SENT, ("b", 1)], ["b: came twice [1]"]),
        ([*SENT, ("b", 5)], ["b: never sent [5]"]),
        ([("a", 1), ("a", 0), ("a", 2), ("b", 0), ("b", 1)], ["a: 0 came after 1"]),
    ],
)
def test_the_checker_finds_lost_duplicate_unknown_and_swapped_events(
    received: list[tuple[str, int]], expected: list[str]
) -> None:
    assert violations(SENT, received) == expected
