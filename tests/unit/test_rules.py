"""The rules about tables, without a database: each finding is reported once, in a sentence with numbers."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from outboxio.health.facts import (
    CircuitReport,
    Facts,
    Failing,
    FullPool,
    HandlerFacts,
    HandlerReport,
    InstanceFacts,
    LockFacts,
    Report,
    RowFacts,
    ShardFacts,
)
from outboxio.health.overview import overview_of
from outboxio.health.rules import RULE_NAMES
from outboxio.health.values import MOST, Overview, counted, human_duration, listed
from outboxio.model.operating.operation import JobRow, Operation, OperationState
from outboxio.storage.protocols import DeferredFigures, HandlerMinute, Holder, InstanceReport, ParkedKey, Waiting

NOW = datetime(2030, 1, 1, 12, 30, 15)
WORKER = "host-a:7:c0ffee"


def ago(**duration: float) -> datetime:
    return NOW - timedelta(**duration)


def instance(name: str = WORKER, *, is_alive: bool = True, **report: Any) -> InstanceFacts:
    seen = NOW if is_alive else ago(minutes=5)
    return InstanceFacts(
        instance=name, version="1", started=ago(hours=1), last_seen=seen, is_alive=is_alive, report=Report(**report)
    )


def handler(name: str = "ledger", **facts: Any) -> HandlerFacts:
    held = [LockFacts(owner=WORKER, since=ago(hours=1))]
    return HandlerFacts(**{
        "name": name, "event_types": ("Paid",), "last_seen": ago(seconds=10), "locks": held, **facts
    })  # fmt: skip


def unheld(*partitions: int, **facts: Any) -> HandlerFacts:
    """A handler of which no process holds some of three partitions; of its only one, if no number is given."""
    numbers = range(3) if partitions else (0,)
    lost = set(partitions or (0,))
    locks = [LockFacts(partition=one, owner=None if one in lost else WORKER) for one in numbers]
    return handler(locks=locks, unheld={"ledger": sorted(lost)}, **facts)


def reporting(**report: Any) -> InstanceFacts:
    """A process that reports this about the handler."""
    return instance(handlers={"ledger": HandlerReport(**report)})


def shard(*handlers: HandlerFacts, **facts: Any) -> ShardFacts:
    held = LockFacts(owner=WORKER, since=ago(hours=1))
    return ShardFacts(**{
        "name": "default", "now": NOW, "handlers": handlers or (handler(),), "fanout": held,
        "instances": [instance()], **facts,
    })  # fmt: skip


def overview(*shards: ShardFacts) -> Overview:
    return overview_of(Facts(namespace="app", shards=shards))


def job(**row: Any) -> JobRow:
    """A job that waits for its next scheduled time."""
    next_date = NOW + timedelta(minutes=5)
    return JobRow(**{
        "name": "close-day", "schedule": "every 300 s", "state": "WAITING", "next_date": next_date,
        "due_date": next_date, "attempts": 1, "instance": WORKER, "started_date": ago(minutes=14),
        "finished_date": ago(minutes=14), "result": "SUCCEEDED", **row,
    })  # fmt: skip


def failed_operation(kind: str, actor: str, error: str) -> Operation:
    return Operation(
        id=uuid4(), kind=kind, state=OperationState.FAILED, matched=0, done=0, refused=0, request={}, actor=actor,
        origin="code", reason=None, created_date=NOW, updated_date=NOW, finished_date=NOW, error=error, shard="default",
    )  # fmt: skip


FAILED = {"result": "FAILED", "attempts": 3, "error": "ValueError: no mail server\nFile mail.py"}
RUNS = {"state": "RUNNING", "due_date": NOW + timedelta(seconds=50), "started_date": ago(seconds=40)}


def reported(facts: ShardFacts) -> list[tuple[str, str]]:
    return [(finding.rule, finding.text) for finding in overview(facts).findings]


def minutes(*, succeeded: int = 0, failed: int = 0, back: int = 0) -> list[HandlerMinute]:
    minute = NOW.replace(second=0) - timedelta(minutes=back)
    return [HandlerMinute(
        handler_name="ledger", minute_date=minute, succeeded=succeeded, failed=failed, dead=0, expired=0, skipped=0,
        duration_us=0, durations=(succeeded, *[0] * 16), lags=(0, succeeded, *[0] * 15),
    )]  # fmt: skip


def parked(blocked: int) -> ParkedKey:
    return ParkedKey("ledger", "k", uuid4(), uuid4(), ago(hours=1), blocked)


def test_a_healthy_outbox_has_a_one_sentence_summary_with_counts() -> None:
    busy = handler(due=3, oldest_due=ago(seconds=0.4), minutes=minutes(succeeded=1700))
    found = overview(shard(busy, handler("mail")))
    assert found.level == "ok"
    assert found.verdict == ["All is well: 2 handlers, 340 notifications a minute, oldest due 0.4 s."]
    assert found.findings == ()


FAULTS: dict[str, tuple[ShardFacts, str]] = {
    "shard_unreachable": (
        shard(error="connection refused"), "Shard `default` cannot be reached: connection refused",
    ),
    "schema_behind": (
        shard(schema="the table operations is missing"),
        "The tables of shard `default` do not match this version of outboxio: the table operations is missing",
    ),
    "no_instance": (
        shard(instances=[instance(is_alive=False)]),
        "No process is running (last seen 5 min ago): events and notifications are waiting.",
    ),
    "lock_without_holder": (
        shard(unheld(due=8211, unowned=8211, oldest_due=ago(minutes=14), oldest_unowned=ago(minutes=14))),
        "No process holds `ledger`: 8,211 notifications wait.",
    ),
    "fanout_behind": (
        shard(undelivered={"Paid": Waiting(1203, ago(minutes=3))}),
        "Fan-out is behind: the oldest event has been waiting for 3 min, 1,203 waiting.",
    ),
    "handler_behind": (
        shard(handler(due=8211, oldest_due=ago(minutes=14))),
        "`ledger` is behind: oldest due 14 min, 8,211 waiting.",
    ),
    "handler_failing": (
        shard(handler(minutes=minutes(succeeded=8, failed=92), last_error="ConnectionError: pdf:8080")),
        "`ledger` failed 92% of 100 runs in the last 5 minutes: ConnectionError: pdf:8080.",
    ),
    "failing_long": (
        shard(handler(blocked=9, failing=Failing(2, ago(hours=5), "ValueError: no amount", ["k1"]))),
        "2 notifications of `ledger` have been failing for 5 h: ValueError: no amount. Later notifications of key `k1` "
        "are blocked until it succeeds or is skipped.",
    ),
    "circuit_open": (
        shard(instances=[instance(handlers={"ledger": HandlerReport(circuit=CircuitReport(ago(seconds=40), "away"))})]),
        "The circuit breaker of `ledger` has been open for 40 s in process host-a:7:c0ffee: away.",
    ),
    "pool_exhausted": (
        shard(instances=[instance(full_pool=FullPool(20, ago(seconds=40)))]),
        "All 20 connections of the pool of process host-a:7:c0ffee have been in use for 40 s: actions and "
        "transactional handlers are waiting for one.",
    ),
    "job_late": (
        shard(jobs=[job(due_date=ago(minutes=9), **FAILED)]),
        "Job `close-day` is late: it has been due for 9 min, but no process runs it.",
    ),
    "job_failing": (
        shard(jobs=[job(**FAILED)]),
        "Job `close-day` ended FAILED 14 min ago, after 3 attempts: ValueError: no mail server.",
    ),
    "new_dead": (
        shard(handler(dead=9, dead_hour=3, newest_dead=ago(minutes=4))),
        "3 notifications of `ledger` ended DEAD or EXPIRED in the last hour, most recently 4 min ago.",
    ),
    "parked_keys": (
        shard(handler(parked=[parked(9), parked(5)])),
        "2 keys of `ledger` are parked by a dead letter, and 14 notifications wait behind.",
    ),
    "stuck_runs": (
        shard(instances=[instance(handlers={"ledger": HandlerReport(stuck=1)})]),
        "1 run of `ledger` is stuck in process host-a:7:c0ffee.",
    ),
    "job_stuck": (
        shard(jobs=[job(**{**RUNS, "due_date": ago(seconds=11), "started_date": ago(minutes=3)})]),
        "Job `close-day` is stuck in process host-a:7:c0ffee: the run started 3 min ago "
        "and ignores its cancellation.",
    ),
    "unroutable": (
        shard(rows={"old-name": RowFacts(due=5, waiting=7)}),
        "12 notifications of `old-name` wait, but no process has this handler: deploy it, or add "
        "`aliases={'old-name'}` to the handler with its new name.",
    ),
    "delayed_long": (
        shard(handler(waiting=3, far=2)),
        "2 notifications of `ledger` are delayed for more than a year: `outboxio retry ID` runs one now.",
    ),
    "event_without_handler": (
        shard(undelivered={"Refunded": Waiting(12, ago(hours=3))}),
        "1 event type has no handler anywhere: `Refunded`. 12 events wait.",
    ),
    "paused_long": (
        shard(handler(paused_since=ago(days=2), due=7, oldest_due=ago(days=2))),
        "`ledger` has been paused for 2 days, 7 waiting.",
    ),
    "clock_off": (
        shard(instances=[instance(clock_offset=-5.2)]),
        "The clock of host-a is 5.2 s behind the clock of the database.",
    ),
    "operation_failed": (
        shard(failed_operations=[failed_operation("retry", "ada", "ValueError: no")]),
        "Operation failed: retry by ada: ValueError: no",
    ),
}  # fmt: skip


def test_there_is_a_finding_for_each_rule() -> None:
    assert tuple(FAULTS) == RULE_NAMES


@pytest.mark.parametrize("rule", FAULTS)
def test_each_rule_reports_its_finding_once_with_a_fix(rule: str) -> None:
    facts, sentence = FAULTS[rule]
    found = overview(facts)
    assert [(finding.rule, finding.text) for finding in found.findings] == [(rule, sentence)]
    assert found.verdict == [sentence]
    assert found.level == ("down" if rule in RULE_NAMES[:3] else "degraded")
    assert found.findings[0].fix


HEALTHY = {
    "an event that waits briefly for fan-out": shard(undelivered={"Paid": Waiting(3, ago(seconds=20))}),
    "an event that becomes available later": shard(undelivered={"Paid": Waiting(3, None), "Other": Waiting(1, None)}),
    "a notification that became due just now": shard(handler(due=1, oldest_due=ago(seconds=50))),
    "a handler that may be late": shard(handler(due=1, oldest_due=ago(minutes=9), alert_age=timedelta(minutes=10))),
    "a paused handler": shard(handler(due=1, oldest_due=ago(hours=9), paused_since=ago(hours=9))),
    "few failures": shard(handler(minutes=minutes(failed=9))),
    "half of the runs": shard(handler(minutes=minutes(failed=10, succeeded=10))),
    "failures of long ago": shard(handler(minutes=minutes(failed=100, back=7))),
    "old dead letters": shard(handler(dead=100, newest_dead=ago(hours=2))),
    "a lock that changes hands": shard(
        unheld(due=1, unowned=1, oldest_due=ago(seconds=20), oldest_unowned=ago(seconds=20))
    ),
    "a batch that waits for more events": shard(
        handler(due=1, oldest_due=ago(minutes=40)), instances=[reporting(max_wait=3600.0)]
    ),
    "a notification that waits for its retry": shard(handler(waiting=3, retrying=3)),
    "a handler that is gone, without work": shard(
        handler(locks=[LockFacts(owner="gone", is_dead=True)], last_seen=ago(hours=2))
    ),
    "a clock that is a little off": shard(instances=[instance(clock_offset=1.9)], clock_offset=-1.9),
    "a new database": shard(handlers=(), instances=[], fanout=LockFacts()),
    "events for other tools": shard(handlers=(), undelivered={"Paid": Waiting(9, ago(days=1))}),
    "a partition without a holder, without work": shard(
        handler(locks=[LockFacts(owner=WORKER), LockFacts(partition=1)])
    ),
    "a job that waits, and a job that has not run yet": shard(jobs=[job(), job(result=None, finished_date=None)]),
    "a pool that is used up briefly": shard(instances=[instance(full_pool=FullPool(20, ago(seconds=20)))]),
    "a job that became due just now": shard(jobs=[job(due_date=ago(seconds=59))]),
    "a job that runs": shard(jobs=[job(**RUNS)]),
    "a job between two attempts": shard(jobs=[job(**{**FAILED, "state": "RETRYING"})]),
    "the second attempt of a job": shard(jobs=[job(**{**FAILED, **RUNS, "attempts": 2})]),
    "a run that has just been cancelled": shard(jobs=[job(**{**RUNS, "due_date": ago(seconds=9)})]),
    "a job that an operator has paused": shard(
        jobs=[job(**FAILED, due_date=ago(minutes=9), paused_date=ago(hours=23))]
    ),
    "contract files that wait": shard(pending=("0008_contract.sql",)),
}


def test_a_handler_behind_without_more_partitions_is_reported_with_the_reason() -> None:
    [finding] = overview(shard(handler(due=8211, oldest_due=ago(minutes=14), lacks_locks=True))).findings
    assert finding.text.endswith("automatic partitions have used up their share of the server's locks.")
    assert finding.fix == "outboxio check"


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_facts_are_not_reported(name: str) -> None:
    assert reported(HEALTHY[name]) == []


def test_notifications_of_newer_versions_are_a_finding_of_their_handler() -> None:
    waits = [DeferredFigures("ledger", "Made", 2, 5)]
    [finding] = overview(shard(handler(deferred=waits))).findings

    assert (finding.rule, finding.handler, finding.level) == ("unroutable", "ledger", "degraded")
    assert finding.text == (
        "5 notifications of `ledger` wait for version 2 of `Made`, but no process that runs the handler has it: deploy "
        "the newer code to the processes that run handlers."
    )
    assert finding.fix == "outboxio list --handler ledger --type Made"


def test_newer_versions_are_named_with_their_counts() -> None:
    waits = [DeferredFigures("ledger", "Made", version, version) for version in (2, 3, 4, 5)]
    former = [DeferredFigures("former-name", "Made", 5, 9_999)]
    rows = handler(deferred=[*waits, *former])
    found = overview(shard(rows, rows={"ledger": rows}))

    assert found.verdict == [
        "10,000+ notifications of `ledger` wait for version 5 of `Made` (10,000+), version 4 of `Made` (4), version 3 "
        "of `Made` (3) and 1 more, but no process that runs the handler has them: deploy the newer code to the "
        "processes that run handlers."
    ]
    assert (found.handlers[0].reasons, found.figures.unroutable) == ({"version": MOST}, MOST)


def test_a_handler_without_a_holder_is_not_also_reported_as_behind() -> None:
    facts = shard(unheld(due=1, unowned=1, oldest_due=ago(hours=1), oldest_unowned=ago(hours=1)))
    assert reported(facts) == [("lock_without_holder", "No process holds `ledger`: 1 notification waits.")]


def test_partitions_without_a_holder_are_named() -> None:
    facts = shard(unheld(1, 2, due=7, unowned=3, oldest_due=ago(seconds=40), oldest_unowned=ago(seconds=31)))
    assert reported(facts) == [
        ("lock_without_holder", "No process holds partitions 1, 2 of `ledger`: 3 notifications wait.")
    ]


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"limited_to": "5/s"}, ", limited to 5/s"),
        ({"in_flight": 20, "limit": 20}, ", all 20 concurrent runs are in use"),
        ({"in_flight": 19, "limit": 20}, ""),
        ({"max_wait": 600.0}, ""),
    ],
)
def test_a_handler_that_is_behind_reports_the_reason(report: dict[str, Any], why: str) -> None:
    facts = shard(handler(due=9, oldest_due=ago(minutes=14)), instances=[reporting(**report)])
    assert reported(facts) == [("handler_behind", f"`ledger` is behind: oldest due 14 min, 9 waiting{why}.")]


def test_of_several_possible_successors_none_is_named() -> None:
    gone = handler("old", is_gone=True, due=1)
    [finding] = overview(shard(gone, handler("mail"), handler("new"))).findings
    assert finding.text.endswith("add `aliases={'old'}` to the handler with its new name.")


def test_each_name_without_a_handler_is_its_own_finding() -> None:
    found = overview(shard(rows={"one": RowFacts(due=1), "two": RowFacts(due=1)})).findings
    assert [(finding.rule, finding.handler) for finding in found] == [("unroutable", "one"), ("unroutable", "two")]


def test_rows_of_a_removed_handler_name_its_possible_successor() -> None:
    gone = handler("old", is_gone=True, due=1, waiting=2, blocked=3, locks=[LockFacts()], unowned=1)
    [finding] = overview(shard(gone, handler("new"))).findings
    assert (finding.rule, finding.fix) == ("unroutable", "outboxio skip --handler old --dry-run")
    assert finding.text == (
        "6 notifications of `old` wait, but no process has this handler: deploy it, or add `aliases={'old'}` to "
        "`new` if that is its new name."
    )


def test_fan_out_without_a_holder_is_not_also_reported_as_behind() -> None:
    facts = shard(fanout=LockFacts(), undelivered={"Paid": Waiting(2, ago(minutes=1))})
    assert reported(facts) == [("lock_without_holder", "No process holds fan-out: 2 events wait.")]


def test_a_holder_that_just_died_is_reported_before_work_is_late() -> None:
    facts = shard(handler(locks=[LockFacts(owner="dead", is_dead=True)]))
    assert reported(facts) == [("lock_without_holder", "No process holds `ledger`.")]


def test_the_worst_finding_comes_first() -> None:
    facts = shard(
        handler("late", due=1, oldest_due=ago(hours=1)),
        handler("dead", dead_hour=1, newest_dead=ago(minutes=1)),
        instances=[],
    )
    assert [rule for rule, _ in reported(facts)] == ["no_instance", "handler_behind", "new_dead"]
    assert [one.handler_name for one in overview(facts).handlers] == ["late", "dead"]


def test_with_several_shards_the_finding_names_the_shard() -> None:
    late = handler(due=1, oldest_due=ago(hours=1))
    found = overview(shard(late, name="one"), shard(name="two", error="refused"))
    assert found.level == "degraded"
    assert found.verdict == [
        "Shard `two` cannot be reached: refused",
        "`ledger` is behind: oldest due 60 min, 1 waiting (shard `one`).",
    ]
    assert overview(shard(name="one", error="refused"), shard(name="two", error="refused")).level == "down"


def test_a_shard_without_a_process_is_degraded_while_another_works() -> None:
    alone = shard(name="two", instances=[])
    found = overview(shard(name="one"), alone)
    assert (found.level, [(one.rule, one.level) for one in found.findings]) == (
        "degraded",
        [("no_instance", "degraded")],
    )
    nowhere = overview(shard(name="one", instances=[]), alone)
    assert (nowhere.level, {one.level for one in nowhere.findings}) == ("down", {"down"})


@pytest.mark.parametrize(("delay", "silent"), [(10, 30), (60, 180), (0, 3)])
def test_a_process_is_alive_until_three_reports_are_missing(delay: int, silent: int) -> None:
    for seconds, is_alive in ((silent - 1, True), (silent, False)):
        report = InstanceReport(
            instance=WORKER, version="1", started_date=ago(hours=1), last_seen_date=ago(seconds=seconds),
            delay_seconds=delay, report=msgspec.Raw(b"{}"),
        )  # fmt: skip
        found = InstanceFacts.of(report, NOW)
        lock = LockFacts.of(0, Holder(WORKER, ago(hours=1), is_released=False), [found], NOW, is_announced=True)
        assert (report.is_alive(NOW), found.is_alive, lock.is_held) == (is_alive, is_alive, is_alive)


def test_a_handler_on_two_shards_is_one_line_with_the_sum() -> None:
    found = overview(
        shard(handler(due=MOST - 1, oldest_due=ago(seconds=3), minutes=minutes(succeeded=5)), name="one"),
        shard(handler(due=7, oldest_due=ago(seconds=9), minutes=minutes(succeeded=5, back=59)), name="two"),
    )
    [line] = found.handlers
    assert (line.due, line.oldest_due, line.per_minute) == (MOST, 9.0, 1.0)
    assert (line.minutes[0], line.minutes[59], sum(line.minutes)) == (5, 5, 10)
    assert (line.duration_p95, line.lag_p95) == (0.001, 0.005)
    assert line.holders == {"one": (WORKER,), "two": (WORKER,)}


def test_durations_and_numbers_are_rounded_for_readers() -> None:
    assert [human_duration(seconds) for seconds in (0, 0.44, 9.96, 61, 119.9, 130, 3600 * 5, 86400, 86400 * 3)] == [
        "0.0 s", "0.4 s", "10.0 s", "61 s", "2 min", "2 min", "5 h", "24 h", "3 days",
    ]  # fmt: skip
    assert [counted(number) for number in (0, 9999, MOST, MOST + 1)] == ["0", "9,999", "10,000+", "10,000+"]
    assert listed(["a", "b", "c", "d", "e"]) == "`a`, `b`, `c` and 2 more"


# --- jobs ----------------------------------------------------------------------------------------


def test_a_retry_keeps_the_earlier_failure_without_its_own_attempt() -> None:
    [(rule, sentence)] = reported(shard(jobs=[job(**{**FAILED, **RUNS, "attempts": 1})]))
    assert (rule, sentence) == (
        "job_failing", "Job `close-day` ended FAILED 14 min ago: ValueError: no mail server.",
    )  # fmt: skip


def test_the_run_of_a_dead_process_is_late_and_not_stuck() -> None:
    gone = job(**{**RUNS, "due_date": ago(minutes=2), "instance": "host-b:9:dead"})
    assert reported(shard(jobs=[gone])) == [
        (
            "job_late",
            "Job `close-day` is late: process host-b:9:dead ended during the run, and no other took over.",
        )
    ]


def test_a_paused_job_that_was_triggered_is_late() -> None:
    [(rule, _)] = reported(
        shard(jobs=[job(due_date=ago(minutes=9), paused_date=ago(hours=1), ordered_date=ago(minutes=9))])
    )
    assert rule == "job_late"


def test_late_jobs_without_any_process_report_the_missing_process() -> None:
    facts = shard(handlers=(), instances=[], jobs=[job(due_date=ago(minutes=9))])
    assert reported(facts) == [("no_instance", "No process is running: events, notifications and jobs are waiting.")]


def test_a_job_paused_for_a_long_time_is_reported() -> None:
    assert reported(shard(jobs=[job(paused_date=ago(days=2))])) == [
        ("paused_long", "Job `close-day` has been paused for 2 days.")
    ]
