"""The rules about a process: which facts make it dead, not ready, degraded or down. Its own facts take precedence."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from outboxio import Health, LoopHealth
from outboxio.health.facts import (
    REACHED_WITHIN,
    Facts,
    HandlerFacts,
    HandlerReport,
    InstanceFacts,
    LocalShard,
    LockFacts,
    Probe,
    ProcessFacts,
    Report,
    RowFacts,
    ShardFacts,
)  # fmt: skip
from outboxio.health.overview import overview_of
from outboxio.health.reader import health_of
from outboxio.health.rules import BLOCKED_FOR
from outboxio.storage.protocols import Waiting

NOW, NOON = 1000.0, datetime(2030, 1, 1, 12)
NAMES = ("first", "second", "third")


def local(**facts: Any) -> LocalShard:
    """A shard that this process reached a second ago."""
    return LocalShard(**{"now": NOW, "runs": True, "fit": "fits", "answered": NOW - 1, **facts})


def health_of_shards(
    *shards: LocalShard, phase: Any = "running", tables: ShardFacts | None = None, **facts: Any
) -> Health:
    named = dict(zip(NAMES, shards or (local(),), strict=False))
    process = ProcessFacts(phase=phase, shards=named, **facts)
    if tables is None:
        return health_of(process)
    read = Facts(namespace="app", shards=[tables])
    return health_of(process, (read, overview_of(read)))


def tables(*handlers: HandlerFacts, **facts: Any) -> ShardFacts:
    """The tables of the first shard, with a process that has reported."""
    worker = InstanceFacts(instance="host-a:7", version="1", started=NOON, last_seen=NOON, is_alive=True)
    return ShardFacts(**{"name": "first", "now": NOON, "handlers": handlers, "instances": [worker], **facts})


def handler(**facts: Any) -> HandlerFacts:
    return HandlerFacts(**{"name": "ship", "last_seen": NOON, "locks": [LockFacts(owner="host-a:7")], **facts})


def test_a_process_whose_loops_work_is_live_ready_and_ok() -> None:
    health = health_of_shards()

    assert (health.status, health.live, health.ready, health.reasons) == ("ok", True, True, ())
    assert health.shards["first"].reachable is True


def test_a_standby_without_locks_is_as_healthy_as_the_holder() -> None:
    health = health_of_shards(local(locks_lacking=("app/fanout", "app/dispatch/receipt")))

    assert (health.status, health.live, health.ready, health.reasons) == ("ok", True, True, ())


def test_an_unresponsive_database_for_30_s_ends_readiness_but_not_liveness() -> None:
    assert health_of_shards(local(answered=NOW - REACHED_WITHIN)).ready
    health = health_of_shards(local(answered=NOW - REACHED_WITHIN - 0.1))
    assert (health.status, health.live, health.ready) == ("down", True, False)
    assert health.reasons == ("shard 'first' cannot be reached",)


def test_a_refused_probe_is_reported_at_once_and_ends_readiness_later() -> None:
    health = health_of_shards(local(probe=Probe(sent=NOW, refused=True)))

    assert (health.status, health.live, health.ready) == ("down", True, True)
    assert health.shards["first"].reachable is False


def test_a_late_probe_does_not_outweigh_a_loop_that_got_answers() -> None:
    assert health_of_shards(local(probe=Probe(sent=NOW))).status == "ok"


def test_an_answer_after_a_refusal_counts() -> None:
    assert health_of_shards(local(probe=Probe(sent=NOW - 3, refused=True))).status == "ok"


def test_one_reachable_shard_of_two_means_ready_but_degraded() -> None:
    health = health_of_shards(local(), LocalShard(now=NOW, runs=True))

    assert (health.status, health.ready, health.reasons) == ("degraded", True, ("shard 'second' cannot be reached",))


@pytest.mark.parametrize(("fit", "text"), [("missing", "run outboxio check"), ("newer", "deploy that version")])
def test_mismatched_tables_end_readiness_and_name_the_fix(fit: Any, text: str) -> None:
    health = health_of_shards(local(fit=fit))

    assert (health.status, health.live, health.ready) == ("down", True, False)
    assert text in health.reasons[0]


def test_a_loop_without_rounds_ends_liveness() -> None:
    health = health_of_shards(local(dead=("the loop 'x' has ended",)))

    assert (health.status, health.live, health.ready) == ("down", False, False)
    assert health.reasons == ("the loop 'x' has ended",)


def test_a_dead_loop_of_one_shard_ends_liveness_despite_healthy_shards() -> None:
    health = health_of_shards(local(dead=("the loop 'x' has ended",)), local())

    assert (health.status, health.live, health.ready) == ("down", False, False)


def test_an_unexpected_end_of_running_ends_liveness() -> None:
    health = health_of_shards(ended=("running() has ended unexpectedly",))

    assert (health.status, health.live, health.ready) == ("down", False, False)


@pytest.mark.parametrize("phase", ["stopped", "starting", "leaving"])
def test_a_process_outside_of_running_is_only_not_ready(phase: Any) -> None:
    health = health_of_shards(phase=phase)

    assert (health.status, health.live, health.ready, health.phase) == ("ok", True, False, phase)
    assert len(health.reasons) == 1


def test_a_shard_that_was_never_probed_is_unknown_without_a_reason() -> None:
    health = health_of_shards(LocalShard(now=NOW), phase="stopped")

    assert health.shards["first"].reachable is None
    assert health.status == "ok"


def test_findings_degrade_the_status_and_the_worst_comes_first() -> None:
    shard = local(stuck=2, loops={"x": LoopHealth(failures=5), "y": LoopHealth(failures=2)}, is_stalled=True)
    late = handler(
        event_types=("Paid",), due=4, oldest_due=NOON - timedelta(seconds=5), dead_hour=3,
        newest_dead=NOON - timedelta(minutes=4),
    )  # fmt: skip
    found = tables(
        late,
        instances=[],
        undelivered={"Paid": Waiting(1, NOON - timedelta(seconds=3))},
        rows={"ship": late, "old": RowFacts(due=4)},
    )

    health = health_of_shards(shard, phase="leaving", tables=found, blocked=(7.5, 10.0))

    assert health.status == "down"
    starts = [
        "No process", "3 notifica", "4 notifica", "the loop '", "shard 'fir", "2 runs are", "the event ", "this proce",
    ]  # fmt: skip
    assert [reason[:10] for reason in health.reasons] == starts
    assert (health.live, health.ready, health.stuck, health.lag) == (True, False, 2, 3.0)
    assert (health.oldest_due, health.unroutable) == ({"ship": 5.0}, 4)


def test_a_loop_is_reported_from_its_third_consecutive_failure() -> None:
    failing = {"x": LoopHealth(failures=3)}

    assert health_of_shards(local(loops=failing)).reasons == ("the loop 'x' has failed 3 times in a row",)
    assert health_of_shards(local(loops={"x": LoopHealth(failures=2)})).reasons == ()
    down = health_of_shards(local(fit="unknown", answered=float("-inf"), loops=failing))
    assert down.reasons == ("shard 'first' cannot be reached",)


def test_a_blocked_event_loop_is_reported_for_a_minute() -> None:
    assert "was blocked for 7.5 s, 59 s ago" in health_of_shards(blocked=(7.5, 59.0)).reasons[0]
    assert health_of_shards(blocked=(7.5, BLOCKED_FOR + 1)).reasons == ()


def test_a_running_process_does_not_report_that_no_process_works() -> None:
    lonely = tables(handler(), instances=[])

    assert health_of_shards(local(in_running=True), tables=lonely).status == "ok"
    stopped = health_of_shards(phase="stopped", tables=lonely)
    assert (stopped.status, stopped.reasons[0]) == (
        "down",
        "No process is running: events and notifications are waiting.",
    )


def test_facts_of_the_process_about_a_shard_take_precedence() -> None:
    assert health_of_shards(tables=tables(schema="the table operations is missing")).reasons == ()
    refused = health_of_shards(tables=tables(error="refused"))
    assert (refused.status, refused.reasons) == (
        "degraded", ("could not check the tables: refused (shard 'first')",),
    )  # fmt: skip


def test_missing_table_facts_degrade_health_unless_a_shard_is_the_reason() -> None:
    unknown = "the overview was not read within 1 s"

    health = health_of_shards(tables_unknown=unknown)

    assert (health.status, health.ready) == ("degraded", True)
    assert health.reasons == ("could not check the tables: the overview was not read within 1 s",)
    gone = health_of_shards(local(answered=NOW - REACHED_WITHIN - 1), tables_unknown=unknown)
    assert gone.reasons == ("shard 'first' cannot be reached",)


def test_stuck_runs_and_open_circuit_breakers_are_reported_once() -> None:
    worker = InstanceFacts(
        instance="host-a:7", version="1", started=NOON, last_seen=NOON, is_alive=True,
        report=Report(handlers={"ship": HandlerReport(stuck=1)}),
    )  # fmt: skip
    stuck = local(stuck=1)

    reported = health_of_shards(stuck, tables=tables(handler(), instances=[worker]))
    assert reported.reasons == ("1 run of `ship` is stuck in process host-a:7.",)
    assert health_of_shards(stuck).reasons == ("1 run is stuck in this process",)
    assert health_of_shards(local(open_circuits={"ship": "no mail server"})).reasons == (
        "circuit breaker of handler 'ship' is open: no mail server",
    )
