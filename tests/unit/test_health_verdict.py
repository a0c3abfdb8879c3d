"""The verdict on the health: which facts make a process dead, not ready, degraded or down."""

from __future__ import annotations

from typing import Any

import pytest

from outboxio import Health
from outboxio.health.values import Answers, Figures, ShardAnswer, Told
from outboxio.health.verdict import REACHED_WITHIN, STANDSTILL_TOLD, Memory, Moment, ShardMemory, judge

NOW = 1000.0
WELL = ShardMemory(runs=True, fit="fits", answered=NOW - 1, locks_held=("app/fanout",))


def health_of(
    *shards: ShardMemory, phase: Any = "running", answers: dict[str, ShardAnswer] | None = None, **facts: Any
) -> Health:
    figures = facts.pop("figures", Figures())
    named = {("first", "second", "third")[number]: shard for number, shard in enumerate(shards or (WELL,))}
    memory = Memory(phase=phase, shards=named, **facts)
    return judge(memory, Answers(shards=answers or {}, figures=figures), Moment(NOW, NOW))


def test_a_process_whose_loops_reach_their_shard_is_live_ready_and_ok_without_a_reason() -> None:
    health = health_of()

    assert (health.status, health.live, health.ready, health.reasons) == ("ok", True, True, ())
    assert health.shards["first"].reachable is True


def test_a_standby_without_locks_is_as_healthy_as_the_holder() -> None:
    standby = ShardMemory(runs=True, fit="fits", answered=NOW, locks_lacking=("app/fanout", "app/dispatch/receipt"))

    health = health_of(standby)

    assert (health.status, health.live, health.ready, health.reasons) == ("ok", True, True, ())


def test_a_database_that_does_not_answer_for_30_s_ends_readiness_and_never_life() -> None:
    just_in_time = ShardMemory(runs=True, fit="fits", answered=NOW - REACHED_WITHIN)
    too_late = ShardMemory(runs=True, fit="fits", answered=NOW - REACHED_WITHIN - 0.1)

    assert health_of(just_in_time).ready
    health = health_of(too_late)
    assert (health.status, health.live, health.ready) == ("down", True, False)
    assert health.reasons == ("shard 'first' cannot be reached",)


def test_a_refused_question_is_told_at_once_and_ends_readiness_only_after_30_s() -> None:
    refused = {"first": ShardAnswer(asked=NOW, refused=True)}

    health = health_of(answers=refused)

    assert (health.status, health.live, health.ready) == ("down", True, True)
    assert health.shards["first"].reachable is False


def test_a_question_that_is_late_contradicts_no_loop_that_was_answered() -> None:
    assert health_of(answers={"first": ShardAnswer(asked=NOW)}).status == "ok"


def test_an_answer_after_a_refusal_counts() -> None:
    refused = {"first": ShardAnswer(asked=NOW - 3, refused=True)}

    assert health_of(answers=refused).status == "ok"


def test_one_reachable_shard_of_two_keeps_a_process_ready_and_makes_it_degraded() -> None:
    down = ShardMemory(runs=True, fit="unknown")

    health = health_of(WELL, down)

    assert (health.status, health.ready, health.reasons) == ("degraded", True, ("shard 'second' cannot be reached",))


@pytest.mark.parametrize(("fit", "words"), [("missing", "run outboxio check"), ("newer", "deploy that version")])
def test_tables_that_do_not_fit_end_readiness_and_say_the_remedy(fit: Any, words: str) -> None:
    health = health_of(ShardMemory(runs=True, fit=fit, answered=NOW))

    assert (health.status, health.live, health.ready) == ("down", True, False)
    assert words in health.reasons[0]


def test_a_loop_without_rounds_is_death() -> None:
    health = health_of(ShardMemory(runs=True, fit="fits", answered=NOW, dead=("the loop 'x' has ended",)))

    assert (health.status, health.live, health.ready) == ("down", False, False)
    assert health.reasons == ("the loop 'x' has ended",)


def test_running_that_has_ended_by_itself_is_death() -> None:
    health = health_of(ended=("running() has ended without being left",))

    assert (health.status, health.live, health.ready) == ("down", False, False)


@pytest.mark.parametrize("phase", ["stopped", "starting", "leaving"])
def test_a_process_outside_of_running_is_not_ready_and_nothing_else(phase: Any) -> None:
    health = health_of(phase=phase)

    assert (health.status, health.live, health.ready, health.phase) == ("ok", True, False, phase)
    assert len(health.reasons) == 1


def test_a_shard_that_was_never_asked_is_unknown_and_no_reason() -> None:
    health = health_of(ShardMemory(), phase="stopped")

    assert health.shards["first"].reachable is None
    assert health.status == "ok"


def test_what_needs_attention_degrades_and_the_worst_reason_comes_first() -> None:
    shard = ShardMemory(
        runs=True, fit="fits", answered=NOW, stuck=2, failing=("the loop 'x' has failed 5 times in a row",),
        is_sick=True,
    )  # fmt: skip
    findings = [Told("shard_gone", "down", "no process is alive"), Told("new_dead", "degraded", "3 are dead")]
    figures = Figures(findings=findings, lag=3.0, oldest_due={"ship": 5.0}, unroutable=4)

    health = health_of(shard, figures=figures, standstill=(NOW - 10, 7.5))

    assert health.status == "down"
    starts = ["no process", "3 are dead", "the loop '", "shard 'fir", "2 notifica", "the event "]
    assert [reason[:10] for reason in health.reasons] == starts
    assert (health.live, health.ready, health.stuck, health.lag) == (True, True, 2, 3.0)
    assert (health.oldest_due, health.unroutable) == ({"ship": 5.0}, 4)


def test_a_standstill_of_the_event_loop_is_told_for_a_minute() -> None:
    assert "stood still for 7.5 s, 59 s ago" in health_of(standstill=(NOW - 59, 7.5)).reasons[0]
    assert health_of(standstill=(NOW - STANDSTILL_TOLD - 1, 7.5)).reasons == ()


def test_a_process_that_runs_is_not_told_that_no_process_works() -> None:
    figures = Figures(findings=[Told("no_instance", "down", "No process works.")])

    assert health_of(figures=figures).status == "ok"
    assert health_of(figures=figures, phase="stopped").status == "down"


def test_health_without_figures_is_degraded_and_says_so_unless_a_shard_is_the_reason() -> None:
    figures = Figures(missing="the overview was not read within 1 s")

    health = health_of(figures=figures)

    assert (health.status, health.ready) == ("degraded", True)
    assert health.reasons == ("faults in the tables are not known, because the overview was not read within 1 s",)
    gone = health_of(ShardMemory(runs=True, fit="fits", answered=NOW - REACHED_WITHIN - 1), figures=figures)
    assert gone.reasons == ("shard 'first' cannot be reached",)


def test_stuck_runs_are_told_once() -> None:
    stuck = ShardMemory(runs=True, fit="fits", answered=NOW, stuck=1)
    figures = Figures(findings=[Told("stuck_runs", "degraded", "1 run of `ship` is stuck.")])

    assert health_of(stuck, figures=figures).reasons == ("1 run of `ship` is stuck.",)
    assert len(health_of(stuck).reasons) == 1
