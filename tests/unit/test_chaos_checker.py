"""The checker of the chaos runs: it detects each violated invariant in a small history."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.chaos.case import Final, Owed, Stored
from tests.chaos.checker import check
from tests.chaos.handlers import Followed, Kind
from tests.chaos.history import Line

SECOND = 1_000_000_000
HANDLERS = {
    "plain": Kind(),
    "counts": Kind(options={"delivery": "transactional"}),
    "ordered": Kind(options={"ordered": True}),
    "once": Kind(options={"delivery": "at_most_once"}),
    "emits": Kind(emits=True),
    "follows": Kind(event=Followed),
    "shared": Kind(options={"partitions": 4}),
    "shared-ordered": Kind(options={"ordered": True, "partitions": 4}),
}


class Story:
    """A made-up history with times in seconds, and the final state; it starts without a violation."""

    def __init__(self) -> None:
        self.lines = [Line("proven", 0, process, until=1000 * SECOND) for process in ("a", "b")]
        self.final = Final()
        self._runs = 0

    def add(self, at: float, process: str, what: str, **details: Any) -> None:
        self.lines.append(Line(what, int(at * SECOND), process, **details))

    def execute(self, action: str, *events: str, end: str = "commit") -> None:
        self.add(0.1, "p", "attempt", action=action, events=list(events))
        self.add(0.2, "p", end, action=action)

    def store(self, action: str, *events: str) -> None:
        self.final.actions.append(action)
        self.final.events += [Stored(event, action, "Happened") for event in events]

    def insert_notifications(
        self, event: str, handler: str, state: str = "SUCCEEDED", *, has_reason: bool = False
    ) -> None:
        self.final.notifications.append(Owed(f"{event}-{handler}", event, handler, state, has_reason))

    def add_other_outcomes(self, event: str) -> None:
        """Add a finished notification of each handler that has none."""
        owed = {(o.event, o.handler) for o in self.final.notifications}
        for handler in HANDLERS.keys() - {"follows"} - {o[1] for o in owed if o[0] == event}:
            self.insert_notifications(event, handler, "DEAD", has_reason=True)

    def run(
        self, event: str, handler: str, begin: float, end: float | None, *, by: str = "a", term: int = 1, **more: Any
    ) -> None:
        """A handler is called, and has its effect at the end; without an end, the handler still runs."""
        self._runs += 1
        decided = int(more.pop("decided", begin) * SECOND)
        self.add(
            begin, by, "start", run=self._runs, event=event, notification=f"{event}-{handler}", handler=handler,
            term=term, decided=decided, **more,
        )  # fmt: skip
        if end is not None:
            self.add(end, by, "effect", run=self._runs, event=event, handler=handler)
            self.add(end, by, "finish", run=self._runs, how="done")

    def settle(
        self, at: float, *events: str, handler: str, by: str = "a", term: int = 1, state: str = "SUCCEEDED",
        written: int | None = None,
    ) -> None:  # fmt: skip
        self._runs += 1
        rows = [(f"{event}-{handler}", handler, term) for event in events]
        self.add(at, by, "settling", run=self._runs, state=state, rows=rows)
        self.add(at, by, "settled", run=self._runs, number=len(rows) if written is None else written)

    def wrong(self) -> set[int]:
        """The numbers of the invariants that do not hold."""
        return {violation.invariant for violation in self.violations()}

    def violations(self) -> list[Any]:
        return check(sorted(self.lines, key=lambda line: line.at), self.final, HANDLERS)


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.fixture
def committed(story: Story) -> Story:
    """A committed event ``e``, which every handler but the plain handler has refused permanently."""
    story.execute("x", "e")
    story.store("x", "e")
    return story


def test_a_correct_history_has_no_violations(committed: Story) -> None:
    committed.run("e", "plain", 1, 2)
    committed.settle(2, "e", handler="plain")
    committed.insert_notifications("e", "plain")
    committed.add_other_outcomes("e")
    assert committed.violations() == []


# --- 1 ---


def test_a_committed_event_missing_from_the_database_is_lost(story: Story) -> None:
    story.execute("x", "e")
    story.final.actions.append("x")
    assert story.wrong() == {1}


def test_an_event_without_a_notification_is_lost(committed: Story) -> None:
    committed.add_other_outcomes("e")
    committed.final.notifications.pop()
    assert committed.wrong() == {1}


def test_a_success_without_an_effect_is_a_loss(committed: Story) -> None:
    committed.insert_notifications("e", "plain")
    committed.add_other_outcomes("e")
    assert committed.wrong() == {1}


def test_a_permanent_failure_without_a_reason_is_a_loss(committed: Story) -> None:
    committed.insert_notifications("e", "plain", "DEAD")
    committed.add_other_outcomes("e")
    assert committed.wrong() == {1}


# --- 2 ---


def test_an_event_of_a_rolled_back_action_must_not_exist(story: Story) -> None:
    story.execute("x", "e", end="rollback")
    story.final.events.append(Stored("e", "x", "NobodyWantsIt"))
    assert story.wrong() == {2}


def test_a_row_of_a_rolled_back_action_must_not_exist(story: Story) -> None:
    story.execute("x", "e", end="rollback")
    story.final.actions.append("x")
    assert story.wrong() == {2}


def test_an_event_of_a_rolled_back_action_must_not_be_handled(story: Story) -> None:
    story.execute("x", "e", end="rollback")
    story.run("e", "plain", 1, 2)
    assert story.wrong() == {2}


def test_an_event_of_an_earlier_attempt_must_not_exist(story: Story) -> None:
    story.add(0.05, "p", "attempt", action="x", events=["first"])
    story.execute("x", "e")
    story.store("x", "e", "first")
    for event in ("e", "first"):
        story.add_other_outcomes(event)
    assert story.wrong() == {2}


@pytest.mark.parametrize(("events", "has_row"), [([], False), (["e", "f"], True)])
def test_an_action_with_an_unknown_result_may_have_committed_or_not(
    story: Story, events: list[str], has_row: bool
) -> None:
    story.execute("x", "e", "f", end="commit_unknown")
    story.final.actions += ["x"] * has_row
    story.final.events += [Stored(event, "x", "NobodyWantsIt") for event in events]
    assert story.wrong() == set()


@pytest.mark.parametrize(("events", "has_row"), [(["e"], True), ([], True), (["e", "f"], False)])
def test_an_action_with_an_unknown_result_must_not_be_half_done(story: Story, events: list[str], has_row: bool) -> None:
    story.execute("x", "e", "f", end="commit_unknown")
    story.final.actions += ["x"] * has_row
    story.final.events += [Stored(event, "x", "NobodyWantsIt") for event in events]
    assert story.wrong() == {2}


def test_an_action_that_nobody_executed_must_not_exist(story: Story) -> None:
    story.final.events.append(Stored("e", "y", "NobodyWantsIt"))
    assert story.wrong() == {2}


# --- 3 ---


@pytest.mark.parametrize(("state", "effects"), [("SUCCEEDED", 0), ("SUCCEEDED", 2), ("DEAD", 1)])
def test_a_transactional_success_has_one_effect_and_a_failure_has_none(
    committed: Story, state: str, effects: int
) -> None:
    committed.run("e", "counts", 1, 2)
    committed.final.effects = [("counts", "e")] * effects
    committed.insert_notifications("e", "counts", state, has_reason=True)
    committed.add_other_outcomes("e")
    assert committed.wrong() == {3}


@pytest.mark.parametrize("emitted", [0, 2])
def test_a_success_emits_its_events_once(committed: Story, emitted: int) -> None:
    committed.run("e", "emits", 1, 2)
    committed.insert_notifications("e", "emits")
    committed.final.events += [Stored(f"c{n}", f"y{n}", "NobodyWantsIt", cause="e") for n in range(emitted)]
    committed.add_other_outcomes("e")
    assert committed.wrong() == {3}


# --- 4 ---


@pytest.fixture
def taken_over(committed: Story) -> Story:
    """The lock of the plain handler moves from ``a`` to ``b`` after five seconds."""
    committed.add(0.5, "a", "taken", lock="app/dispatch/plain", term=1)
    committed.add(5, "b", "taken", lock="app/dispatch/plain", term=2)
    committed.run("e", "plain", 1, 2)
    committed.insert_notifications("e", "plain")
    committed.add_other_outcomes("e")
    return committed


def test_an_outcome_written_under_an_old_term_is_found(taken_over: Story) -> None:
    taken_over.settle(6, "e", handler="plain", state="FAILED")
    assert taken_over.wrong() == {4}


def test_an_outcome_refused_under_an_old_term_is_correct(taken_over: Story) -> None:
    taken_over.settle(6, "e", handler="plain", written=0)
    taken_over.settle(7, "e", handler="plain", by="b", term=2)
    assert taken_over.wrong() == set()


def test_an_outcome_written_twice_is_found(taken_over: Story) -> None:
    taken_over.settle(3, "e", handler="plain")
    taken_over.settle(6, "e", handler="plain", by="b", term=2)
    assert taken_over.wrong() == {4}


def test_a_term_issued_twice_is_found(taken_over: Story) -> None:
    taken_over.add(8, "a", "taken", lock="app/dispatch/plain", term=2)
    assert taken_over.wrong() == {4}


def test_a_process_frozen_while_recording_its_lock_acquired_it_earlier(taken_over: Story) -> None:
    taken_over.add(1, "a", "proven", until=6 * SECOND)
    taken_over.add(7, "a", "taken", lock="app/dispatch/plain", term=1)
    assert taken_over.wrong() == set()
    taken_over.add(7, "a", "proven", until=9 * SECOND)
    assert taken_over.wrong() == {4}


# --- 5 ---


def test_runs_of_one_event_must_not_overlap_under_one_term(committed: Story) -> None:
    committed.run("e", "plain", 1, 3)
    committed.run("e", "plain", 2, 4)
    committed.insert_notifications("e", "plain")
    committed.add_other_outcomes("e")
    assert committed.wrong() == {5}


def test_runs_of_one_event_may_overlap_across_a_change_of_term(taken_over: Story) -> None:
    taken_over.run("e", "plain", 4, 8)
    taken_over.run("e", "plain", 6, 9, by="b", term=2)
    assert taken_over.wrong() == set()


def test_a_run_lasts_until_its_process_has_ended(committed: Story) -> None:
    committed.run("e", "plain", 1, None)
    committed.run("e", "plain", 3, 4)
    committed.insert_notifications("e", "plain")
    committed.add_other_outcomes("e")
    assert committed.wrong() == {5}
    committed.add(2, "arena", "exit", how="a")
    assert committed.wrong() == set()


def test_nothing_may_start_after_the_last_lock_proof_expired(committed: Story) -> None:
    committed.add(1, "a", "proven", until=2 * SECOND)
    committed.run("e", "plain", 4, 5, decided=3)
    committed.insert_notifications("e", "plain")
    committed.add_other_outcomes("e")
    assert committed.wrong() == {5}
    committed.add(2.5, "a", "proven", until=6 * SECOND)
    assert committed.wrong() == set()


def test_nothing_may_start_after_its_outcome_was_written(taken_over: Story) -> None:
    taken_over.settle(3, "e", handler="plain")
    assert taken_over.wrong() == set()
    taken_over.run("e", "plain", 6, 7, by="b", term=2)
    assert taken_over.wrong() == {5}


def test_a_former_holder_may_start_a_run_with_an_unknown_outcome(taken_over: Story) -> None:
    taken_over.settle(6, "e", handler="plain", by="b", term=2)
    taken_over.run("e", "plain", 6.5, 7)
    assert taken_over.wrong() == set()


def test_a_lock_must_not_be_released_during_its_runs(committed: Story) -> None:
    committed.run("e", "plain", 1, 3)
    committed.add(2, "a", "released", locks=["app/dispatch/plain"])
    committed.insert_notifications("e", "plain")
    committed.add_other_outcomes("e")
    assert committed.wrong() == {5}


def test_waiting_for_a_handler_that_ignores_cancellation_is_not_required(committed: Story) -> None:
    committed.run("e", "plain", 1, 3, how="ignore")
    committed.add(2, "a", "released", locks=["app/dispatch/plain"])
    committed.insert_notifications("e", "plain")
    committed.add_other_outcomes("e")
    assert committed.wrong() == set()


# --- 6 ---


@pytest.fixture
def in_line(story: Story) -> Story:
    """Two committed events of one key, ``e`` before ``f``."""
    story.execute("x", "e", "f")
    story.store("x", "e", "f")
    for event in ("e", "f"):
        story.insert_notifications(event, "ordered")
        story.add_other_outcomes(event)
    return story


def test_events_of_one_key_are_handled_one_at_a_time(in_line: Story) -> None:
    in_line.run("e", "ordered", 1, 2, key="k", sequence=1)
    in_line.settle(2, "e", handler="ordered")
    in_line.run("f", "ordered", 3, 4, key="k", sequence=2)
    assert in_line.wrong() == set()


def test_an_event_must_not_start_before_earlier_events_of_its_key(in_line: Story) -> None:
    in_line.run("f", "ordered", 1, 2, key="k", sequence=2)
    in_line.run("e", "ordered", 3, 4, key="k", sequence=1)
    in_line.settle(4, "e", handler="ordered")
    assert in_line.wrong() == {6}


def test_an_event_must_not_start_before_the_previous_outcome_is_written(in_line: Story) -> None:
    in_line.run("e", "ordered", 1, 2, key="k", sequence=1)
    in_line.run("f", "ordered", 3, 4, key="k", sequence=2)
    in_line.settle(5, "e", handler="ordered")
    assert in_line.wrong() == {6}


def test_events_of_one_key_must_not_overlap(in_line: Story) -> None:
    in_line.run("e", "ordered", 1, 4, key="k", sequence=1)
    in_line.settle(2, "e", handler="ordered")
    in_line.run("f", "ordered", 3, 5, key="k", sequence=2)
    assert in_line.wrong() == {6}


def test_a_former_holder_may_repeat_a_finished_event(in_line: Story) -> None:
    in_line.run("e", "ordered", 1, 2, key="k", sequence=1)
    in_line.settle(2, "e", handler="ordered", written=0)
    in_line.run("e", "ordered", 3, 4, by="b", term=2, key="k", sequence=1)
    in_line.settle(4, "e", handler="ordered", by="b", term=2)
    in_line.run("f", "ordered", 5, 6, by="b", term=2, key="k", sequence=2)
    assert in_line.wrong() == set()


# --- 7 ---


def test_leftovers_are_found(story: Story) -> None:
    story.final.left.append("a session")
    assert story.wrong() == {7}


def test_a_leftover_task_is_found(story: Story) -> None:
    story.add(9, "a", "tasks", how="<Task pending>")
    assert story.wrong() == {7}


def test_an_event_without_fan_out_is_found(committed: Story) -> None:
    committed.final.events[0] = msgspec.structs.replace(committed.final.events[0], delivered=False)
    committed.add_other_outcomes("e")
    assert committed.wrong() == {7}


def test_a_row_that_is_still_due_is_found(committed: Story) -> None:
    committed.insert_notifications("e", "plain", "PENDING")
    committed.add_other_outcomes("e")
    assert committed.wrong() == {7}


def test_wrong_counters_are_found(committed: Story) -> None:
    committed.run("e", "plain", 1, 2)
    committed.settle(2, "e", handler="plain")
    committed.insert_notifications("e", "plain")
    committed.add_other_outcomes("e")
    committed.add(9, "a", "counters", counters={"succeeded": 1})
    assert committed.wrong() == set()
    committed.add(10, "a", "counters", counters={"succeeded": 2})
    assert committed.wrong() == {7}


# --- 8 ---


def test_a_run_that_may_happen_once_must_not_start_twice(committed: Story) -> None:
    committed.run("e", "once", 1, 2)
    committed.run("e", "once", 3, 4)
    committed.insert_notifications("e", "once")
    committed.add_other_outcomes("e")
    assert committed.wrong() == {8}


# --- partitions ---


def test_an_outcome_under_an_old_term_is_found_in_its_partition(committed: Story) -> None:
    committed.add(0.5, "a", "taken", lock="app/dispatch/shared/3", term=1)
    committed.add(5, "b", "taken", lock="app/dispatch/shared/2", term=2)
    committed.insert_notifications("e", "shared")
    committed.add_other_outcomes("e")
    committed.run("e", "shared", 1, 2, partition=3)
    committed.add(6, "a", "settling", run=90, state="SUCCEEDED", rows=[("e-shared", "shared/3", 1)])
    committed.add(6, "a", "settled", run=90, number=1)
    assert committed.wrong() == set()
    committed.add(5, "b", "taken", lock="app/dispatch/shared/3", term=2)
    assert committed.wrong() == {4}


def test_two_owned_partitions_must_not_run_an_event_at_once(committed: Story) -> None:
    committed.run("e", "shared", 1, 3, term=1)
    committed.run("e", "shared", 2, 4, by="b", term=5, partition=3)
    committed.insert_notifications("e", "shared")
    committed.add_other_outcomes("e")
    assert committed.wrong() == {5}
    committed.add(1.5, "b", "taken", lock="app/dispatch/shared", term=2)
    assert committed.wrong() == set(), "the first of the processes was fenced"


def test_an_event_finished_in_one_partition_must_not_start_in_another(committed: Story) -> None:
    committed.run("e", "shared", 1, 2)
    committed.settle(2, "e", handler="shared")
    committed.run("e", "shared", 3, 4, by="b", term=1, partition=3)
    committed.insert_notifications("e", "shared")
    committed.add_other_outcomes("e")
    assert committed.wrong() == {5}


def test_events_of_one_key_must_not_overlap_in_two_partitions(in_line: Story) -> None:
    for event in ("e", "f"):
        in_line.final.notifications.remove(Owed(f"{event}-shared-ordered", event, "shared-ordered", "DEAD", True))
        in_line.insert_notifications(event, "shared-ordered")
    in_line.run("e", "ordered", 1, 2)
    in_line.run("f", "ordered", 3, 4)
    in_line.run("e", "shared-ordered", 1, 4, key="k", sequence=1, term=1)
    in_line.settle(2, "e", handler="shared-ordered")
    in_line.run("f", "shared-ordered", 3, 5, by="b", term=7, partition=2, key="k", sequence=2)
    assert in_line.wrong() == {6}


def test_a_partition_must_not_be_released_during_its_runs(committed: Story) -> None:
    committed.run("e", "shared", 1, 3, partition=2)
    committed.add(2, "a", "released", locks=["app/dispatch/shared"])
    committed.insert_notifications("e", "shared")
    committed.add_other_outcomes("e")
    assert committed.wrong() == set()
    committed.add(2, "a", "released", locks=["app/dispatch/shared/2"])
    assert committed.wrong() == {5}


# --- 9 ---


@pytest.fixture
def left_alone(committed: Story) -> Story:
    """An event waits in partition 2 for seven seconds; ``a`` lost the partition, and ``b`` takes it at last."""
    for process in ("a", "b"):
        committed.add(0, process, "running")
        for number in range(1, 20):
            committed.add(number / 2, process, "proven", until=(number + 5) * SECOND // 2)
    committed.add(0.05, "a", "taken", lock="app/dispatch/shared/2", term=1)
    committed.add(7, "b", "taken", lock="app/dispatch/shared/2", term=2)
    committed.run("e", "shared", 7.2, 8, by="b", term=2, partition=2)
    committed.insert_notifications("e", "shared")
    committed.add_other_outcomes("e")
    return committed


@pytest.mark.parametrize(("lost_at", "wrong"), [(4, {9}), (6, set())])
def test_a_partition_with_due_rows_is_owned_again_soon(left_alone: Story, lost_at: int, wrong: set[int]) -> None:
    left_alone.add(lost_at, "a", "lost", lock="app/dispatch/shared/2")
    assert left_alone.wrong() == wrong


@pytest.mark.parametrize(("killed_at", "wrong"), [(4, {9}), (6, set())])
def test_a_partition_of_a_dead_process_is_owned_again_soon(left_alone: Story, killed_at: int, wrong: set[int]) -> None:
    left_alone.add(killed_at, "arena", "exit", how="a")
    assert left_alone.wrong() == wrong


def test_a_frozen_process_loses_its_partitions_after_its_proofs_expire(left_alone: Story) -> None:
    proofs = [line for line in left_alone.lines if line.process == "a" and line.what == "proven"]
    for line in proofs:
        if line.at > 2 * SECOND:  # the previous proof expires after 4.5 s
            left_alone.lines.remove(line)
    proofs[0].until = SECOND
    assert left_alone.wrong() == {9}
    left_alone.add(3, "arena", "fault", state="begins", how="restart")
    left_alone.add(5, "arena", "fault", state="is over", how="restart down for 2.0 s")
    assert left_alone.wrong() == set(), "the database was away at that time"


@pytest.mark.parametrize(("spread_at", "wrong"), [(1, {9}), (6, set())])
def test_a_new_partition_must_be_owned_once_the_count_has_risen(
    left_alone: Story, spread_at: int, wrong: set[int]
) -> None:
    left_alone.add(4, "a", "lost", lock="app/dispatch/shared/2")
    left_alone.add(spread_at, "b", "spread", number=4)
    assert left_alone.wrong() == wrong


def test_no_partition_needs_an_owner_while_no_process_works(left_alone: Story) -> None:
    left_alone.add(4, "arena", "exit", how="a")
    left_alone.add(4, "b", "leaving")
    for line in [line for line in left_alone.lines if line.process == "a" and line.at > 4 * SECOND]:
        left_alone.lines.remove(line)
    assert left_alone.wrong() == set()


@pytest.mark.parametrize(("begins", "wrong"), [(1, {9}), (4, set())])
def test_a_blocked_event_loop_counts_from_the_time_it_is_blocked(
    left_alone: Story, begins: int, wrong: set[int]
) -> None:
    left_alone.add(4, "a", "lost", lock="app/dispatch/shared/2")
    left_alone.add(0.5, "arena", "fault", state="begins", how="block")
    left_alone.add(0.6, "arena", "fault", state="is over", how="block a for 1.0 s")
    left_alone.add(begins, "a", "blocking", until=(begins + 1) * SECOND)
    assert left_alone.wrong() == wrong


def test_a_waiting_row_in_an_owned_partition_is_no_ownership_violation(left_alone: Story) -> None:
    assert left_alone.wrong() == set()


# --- 10 ---


@pytest.mark.parametrize(("times", "how", "wrong"), [
    (4, "given", {10}), (2, "given", set()), (4, "leaving", set()),
])  # fmt: skip
def test_a_released_partition_is_for_other_processes(story: Story, times: int, how: str, wrong: set[int]) -> None:
    for number in range(times):
        at = 10 + number / 5
        story.add(at, "a", "released", locks=["app/dispatch/shared/2"], how=how)
        story.add(at, "a", "lost", lock="app/dispatch/shared/2")
        story.add(at + 0.1, "a", "taken", lock="app/dispatch/shared/2", term=number + 2)
    assert story.wrong() == wrong


def test_a_released_partition_may_be_reacquired_later(story: Story) -> None:
    for number in range(6):
        story.add(10 + number, "a", "released", locks=["app/dispatch/shared/2"], how="given")
        story.add(10 + number, "a", "lost", lock="app/dispatch/shared/2")
        story.add(10.5 + number, "b" if number % 2 else "a", "taken", lock="app/dispatch/shared/2", term=number + 2)
    assert story.wrong() == set()


def test_a_run_counts_the_attempts_that_failed_before(story: Story) -> None:
    story.run("e", "plain", 1, None, attempt=1)
    story.add(2, "a", "finish", run=1, how="failed: ValueError('no')")
    story.settle(3, "e", handler="plain", state="FAILED")
    story.run("e", "plain", 4, 5, attempt=1)

    assert any("was attempt 1, after 1 attempts had failed" in violation.what for violation in story.violations())
