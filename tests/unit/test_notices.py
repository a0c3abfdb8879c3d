"""Which notices a receiver gets for the findings of each evaluation."""

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


Evaluate = Callable[..., list[tuple[str, bool]]]


@pytest.fixture
def evaluate() -> Evaluate:
    """Report findings, and return the delivered notices: the rule, and whether the finding has ended."""
    notices = Notices()

    def report(*findings: Finding, error: str | None = None) -> list[tuple[str, bool]]:
        due = notices.update(evaluation(*findings, error=error))
        delivered = [(notice.finding.rule, notice.content.ended is not None) for notice in due]
        for notice in due:
            notices.sent(notice)
        return delivered

    return report


def test_a_finding_with_other_counts_is_the_same_finding(evaluate: Evaluate) -> None:
    assert evaluate(finding("handler_behind", "mail", text="20 wait")) == [("handler_behind", False)]
    assert evaluate(finding("handler_behind", "mail", text="21 wait")) == []
    assert evaluate(finding("handler_behind", "mail"), finding("handler_behind", "sms")) == [("handler_behind", False)]


def test_a_finding_ends_after_two_consecutive_absences(evaluate: Evaluate) -> None:
    assert [len(evaluate(*each)) for each in _seen("x..x.x..", "clock_off")] == [1, 0, 1, 1, 0, 0, 0, 1]


def _seen(course: str, rule: str) -> Sequence[Sequence[Finding]]:
    return [[finding(rule)] if sign == "x" else [] for sign in course]


def test_findings_of_an_unreachable_shard_have_not_ended(evaluate: Evaluate) -> None:
    evaluate(finding("handler_behind", "mail"))
    lost = finding("shard_unreachable")
    assert evaluate(lost, error="refused") == [("shard_unreachable", False)]
    assert evaluate(lost, error="refused") == evaluate(lost, error="refused") == []
    assert evaluate() == []
    assert sorted(evaluate()) == [("handler_behind", True), ("shard_unreachable", True)]


def test_a_finding_hidden_by_a_worse_one_has_not_ended(evaluate: Evaluate) -> None:
    rule = next(rule for rule in RULES if rule.unless)
    evaluate(finding(rule.name))
    worse = finding(rule.unless[0])
    assert evaluate(worse) == [(worse.rule, False)]
    assert evaluate(worse) == evaluate(worse) == []
    evaluate()
    assert sorted(evaluate()) == sorted([(rule.name, True), (worse.rule, True)])


def test_an_undelivered_finding_ends_without_a_notice() -> None:
    notices = Notices()
    assert len(notices.update(evaluation(finding("clock_off")))) == 1
    assert notices.update(evaluation()) == notices.update(evaluation()) == []


def test_since_is_the_time_a_finding_was_first_seen() -> None:
    notices = Notices()
    notices.update(evaluation(finding("clock_off")))
    [notice] = notices.update(evaluation(finding("clock_off"), after=15))
    assert notice.content.since == NOW


def test_a_restart_of_the_only_process_is_not_reported(evaluate: Evaluate) -> None:
    assert evaluate(finding("no_instance")) == evaluate() == evaluate(finding("no_instance")) == []
    assert evaluate(finding("no_instance")) == [("no_instance", False)]


def test_a_returning_leader_uses_the_state_stored_by_the_other_process() -> None:
    """Another process reported the end in between, so it is not reported again, and the next finding is new."""
    notices = Notices()
    for notice in notices.update(evaluation(finding("new_dead", "mail"), finding("shard_unreachable"))):
        notices.sent(notice)
    notices.add([])

    assert [one.finding.rule for one in notices.all] == ["shard_unreachable"]
    [again] = notices.update(evaluation(finding("new_dead", "mail"), finding("shard_unreachable")))
    assert (again.finding.rule, again.is_sent) == ("new_dead", False)
