"""What a receiver has to be notified of, by the findings of each evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace

from outboxio import Finding, Overview
from outboxio.health.facts import Facts, ShardFacts
from outboxio.health.notices import Notices
from outboxio.health.overview import overview_of
from outboxio.health.rules import RULES

NOW = datetime(2030, 1, 1, 12)


def finding(rule: str, handler: str | None = None, *, shard: str = "default", text: str = "wrong") -> Finding:
    return Finding(rule=rule, level="degraded", text=text, fix="outboxio status", handler=handler, shard=shard)


def evaluation(*findings: Finding, error: str | None = None, after: float = 0.0) -> Overview:
    now = NOW + timedelta(seconds=after)
    facts = Facts(namespace="app", shards=[ShardFacts(name="default", now=now, error=error)])
    return replace(overview_of(facts), findings=findings)


Tell = Callable[..., list[tuple[str, bool]]]


@pytest.fixture
def tell() -> Tell:
    """Evaluates findings, and delivers what is due: rules, and whether they have ended."""
    notices = Notices()

    def evaluate(*findings: Finding, error: str | None = None) -> list[tuple[str, bool]]:
        due = notices.update(evaluation(*findings, error=error))
        told = [(notice.finding.rule, notice.content.ended is not None) for notice in due]
        for notice in due:
            notices.sent(notice)
        return told

    return evaluate


def test_a_finding_with_other_numbers_is_the_same(tell: Tell) -> None:
    assert tell(finding("handler_behind", "mail", text="20 wait")) == [("handler_behind", False)]
    assert tell(finding("handler_behind", "mail", text="21 wait")) == []
    assert tell(finding("handler_behind", "mail"), finding("handler_behind", "sms")) == [("handler_behind", False)]


def test_an_end_is_due_after_two_absences_in_a_row(tell: Tell) -> None:
    assert [len(tell(*each)) for each in _seen("x..x.x..", "clock_off")] == [1, 0, 1, 1, 0, 0, 0, 1]


def _seen(course: str, rule: str) -> Sequence[Sequence[Finding]]:
    return [[finding(rule)] if sign == "x" else [] for sign in course]


def test_findings_of_an_unreachable_shard_have_not_ended(tell: Tell) -> None:
    tell(finding("handler_behind", "mail"))
    lost = finding("shard_unreachable")
    assert tell(lost, error="refused") == [("shard_unreachable", False)]
    assert tell(lost, error="refused") == tell(lost, error="refused") == []
    assert tell() == []
    assert sorted(tell()) == [("handler_behind", True), ("shard_unreachable", True)]


def test_a_finding_that_a_worse_one_hides_has_not_ended(tell: Tell) -> None:
    rule = next(rule for rule in RULES if rule.unless)
    tell(finding(rule.name))
    worse = finding(rule.unless[0])
    assert tell(worse) == [(worse.rule, False)]
    assert tell(worse) == tell(worse) == []
    tell()
    assert sorted(tell()) == sorted([(rule.name, True), (worse.rule, True)])


def test_a_finding_that_was_not_delivered_ends_without_a_notice() -> None:
    notices = Notices()
    assert len(notices.update(evaluation(finding("clock_off")))) == 1
    assert notices.update(evaluation()) == notices.update(evaluation()) == []


def test_since_is_when_a_finding_was_first_seen() -> None:
    notices = Notices()
    notices.update(evaluation(finding("clock_off")))
    [notice] = notices.update(evaluation(finding("clock_off"), after=15))
    assert notice.content.since == NOW


def test_a_restart_of_the_only_process_is_not_reported(tell: Tell) -> None:
    assert tell(finding("no_instance")) == tell() == tell(finding("no_instance")) == []
    assert tell(finding("no_instance")) == [("no_instance", False)]


def test_who_leads_again_goes_by_what_the_other_process_has_stored() -> None:
    """Another process has reported the end meanwhile, so it is not reported again, and the next one is new."""
    notices = Notices()
    for notice in notices.update(evaluation(finding("new_dead", "mail"), finding("shard_unreachable"))):
        notices.sent(notice)
    notices.add([])

    assert [one.finding.rule for one in notices.all] == ["shard_unreachable"]
    [again] = notices.update(evaluation(finding("new_dead", "mail"), finding("shard_unreachable")))
    assert (again.finding.rule, again.is_sent) == ("new_dead", False)
