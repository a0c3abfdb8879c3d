"""Checks whether the history of a run keeps outboxio's guarantees, by pure functions of the history and the tables.

Each invariant is a function of a `Case`, and yields a sentence per violation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from msgspec import Struct

from tests.chaos.case import NEVER, TERMINAL, Case, Final, Run, Violation, hook_of, lock_of
from tests.chaos.handlers import HANDLERS, Kind
from tests.chaos.history import Line
from tests.chaos.ownership import left_to_others, owned_again

SAME_MOMENT = 50_000_000  # nanoseconds between the expiry of a lock proof and the decision to start a run

INVARIANTS = {
    1: "a committed event has an effect in each of its handlers, or an end with a reason",
    2: "a rolled-back action leaves no row, and an action whose end is unknown leaves all of its rows or none",
    3: "a transactional handler has exactly one effect in the database, and a success emits exactly once",
    4: "an outcome is written only under the newest term, and an end only once",
    5: "runs of a notification overlap only across a change of term, and no run starts unproven or after its end",
    6: "events of an ordering key start in order, and do not overlap",
    7: "afterwards no row is left over, and the counters agree with the history",
    8: "a handler that may run at most once never starts twice",
    9: "a partition with due rows is owned again within 2 s, as long as a process can own it",
    10: "a process leaves a partition that it gave back to the others",
}


def check(history: Sequence[Line], final: Final, handlers: Mapping[str, Kind] = HANDLERS) -> list[Violation]:
    """All violations of the invariants."""
    case = Case(history, final, handlers)
    return [Violation(number, what) for number, holds in _CHECKS.items() for what in holds(case)]


# --- 1: nothing is lost --------------------------------------------------------------------------


def _nothing_is_lost(case: Case) -> Iterator[str]:
    there = {event.id for event in case.final.events}
    for action in _actions(case):
        if action.end == "commit":
            for event in action.events:
                if event not in there:
                    yield f"event {event} of the committed action {action.id} is not in the database"
    done = {(line.handler, line.event) for line in case.lines("effect")}
    for event in case.final.events:
        for handler in case.kinds.get(event.type, ()):
            owed = case.owed.get((event.id, handler))
            if owed is None:
                yield f"event {event.id} was never made a notification of {handler}"
            elif owed.state == "SUCCEEDED" and (handler, event.id) not in done:
                yield f"{handler} has succeeded for event {event.id}, and has never done anything for it"
            elif owed.state in TERMINAL - {"SUCCEEDED"} and not owed.has_reason:
                yield f"the notification of event {event.id} for {handler} is {owed.state}, and says no reason"


# --- 2: all or nothing ---------------------------------------------------------------------------


class Done(Struct):
    """An action, with the events of its last attempt and of earlier attempts."""

    id: str
    end: str
    events: list[str]
    given_up: list[str]


def _actions(case: Case) -> list[Done]:
    found: dict[str, Done] = {}
    for line in case.lines("attempt", "commit", "rollback", "commit_unknown"):
        action = found.setdefault(line.action, Done(line.action, "commit_unknown", [], []))
        if line.what == "attempt":
            action.given_up += action.events
            action.events = line.events
        else:
            action.end = line.what
    return list(found.values())


def _all_or_nothing(case: Case) -> Iterator[str]:
    stored = Counter(event.action for event in case.final.events)
    there, rows = {event.id for event in case.final.events}, set(case.final.actions)
    started = {line.event for line in case.lines("start")} | {event for _, event in case.final.effects}
    actions = _actions(case)
    for action in actions:
        for event in action.given_up + (action.events if action.end == "rollback" else []):
            if event in there or event in started:
                yield f"event {event} of action {action.id} was rolled back, and is there or was handled"
        found, has_row = there.intersection(action.events), action.id in rows
        if action.end == "rollback" and has_row:
            yield f"action {action.id} was rolled back, and its own row is there"
        if action.end == "commit" and not has_row:
            yield f"action {action.id} was committed, and its own row is not there"
        if action.end == "commit_unknown" and (len(found), has_row) not in ((0, False), (len(action.events), True)):
            yield f"action {action.id} left {len(found)} of {len(action.events)} events, its own row: {has_row}"
    known = {action.id for action in actions}
    caused = {event.action for event in case.final.events if event.cause}
    for action_id in stored.keys() - known - caused:
        yield f"action {action_id} has {stored[action_id]} events, and nobody executed it"


# --- 3: exactly one effect -----------------------------------------------------------------------


def _exactly_one_effect(case: Case) -> Iterator[str]:
    effects, children = Counter(case.final.effects), Counter(event.cause for event in case.final.events)
    for owed in case.final.notifications:
        kind = case.handlers.get(owed.handler)
        wanted = int(owed.state == "SUCCEEDED")
        if kind is not None and kind.hook_fails is not None:
            hooks = effects.pop((hook_of(owed.handler), owed.event), 0)
            if hooks != int(owed.state == "DEAD"):
                yield f"the hook of {owed.handler} has {hooks} effects for event {owed.event}, which is {owed.state}"
        if owed.id in case.reopened:
            effects.pop((owed.handler, owed.event), 0)  # one for each success
        elif kind is not None and kind.in_transaction:
            number = effects.pop((owed.handler, owed.event), 0)
            if number != wanted:
                yield f"{owed.handler} has {number} effects for event {owed.event}, whose row is {owed.state}"
        if kind is not None and kind.emits and children[owed.event] != wanted:
            yield f"{owed.handler} has emitted {children[owed.event]} events for {owed.event}, which is {owed.state}"
    for (handler, event), number in effects.items():
        yield f"{handler} has {number} effects for event {event}, of which it has no notification"


# --- 4: only under the newest term ---------------------------------------------------------------


def _only_under_newest_term(case: Case) -> Iterator[str]:
    for lock, taken in case.newest.items():
        # A process frozen while it recorded its locks may record some of them after other processes have acquired them.
        in_time = [line for line in taken if line.at <= case.proven_until(line.process, line.at, NEVER) + SAME_MOMENT]
        for before, after in pairwise(in_time):
            if after.term <= before.term:
                yield (
                    f"term {after.term} of {lock} was given to {after.process} after {before.process} had {before.term}"
                )
    ended = Counter[str]()
    for line in case.lines("settling"):
        written = case.outcomes.get((line.process, line.run), 0)
        valid = [row for row in line.rows if not row[2] or not case.superseded(row[1], row[2], line.at)]
        if written > len(valid):
            old = ", ".join(sorted({f"{row[1]} under term {row[2]}" for row in line.rows if row not in valid}))
            yield f"{line.process} wrote {written - len(valid)} outcomes ({line.state}) of {old}, which was over"
        if line.state in TERMINAL and written == len(line.rows):
            ended.update(row[0] for row in line.rows)
    for notification, number in ended.items():
        if number > 1 + len(case.reopened.get(notification, ())):
            yield f"notification {notification} was brought to an end {number} times"


# --- 5: one at a time ----------------------------------------------------------------------------


def _one_at_a_time(case: Case) -> Iterator[str]:
    runs: dict[str, list[Run]] = defaultdict(list)
    for run in case.runs:
        runs[run.line.notification].append(run)
    for some in runs.values():
        yield from _overlaps(case, some, "the same event")
    yield from _unproven(case)
    yield from _after_the_end(case)
    yield from _released_too_early(case)


def _overlaps(case: Case, runs: Sequence[Run], what: str) -> Iterator[str]:
    """The runs that overlap although no other process had taken the lock of the earlier run."""
    open_runs: list[Run] = []
    for run in sorted(runs, key=lambda run: run.line.at):
        open_runs = [other for other in open_runs if other.end > run.line.at]
        for other in open_runs:
            if other.is_same_call(run):
                continue
            if other.slot == run.slot:
                is_wrong = other.line.term == run.line.term
            else:
                is_wrong = not case.superseded(other.slot, other.line.term, run.line.at)
            if is_wrong:
                yield f"{other} was not over when {run} started, for {what}"
        open_runs.append(run)


def _unproven(case: Case) -> Iterator[str]:
    for run in case.runs:
        until = case.proven_until(run.line.process, run.line.decided, 0)
        if run.line.decided > until + SAME_MOMENT:
            late = (run.line.decided - until) / 1e9
            yield f"{run} was decided on {late:.3f} s after the last proof of its locks was over"


def _after_the_end(case: Case) -> Iterator[str]:
    """A former holder may not know of an end yet; the process that wrote the end and every later holder do."""
    ends: dict[str, tuple[int, str, int]] = {}
    for line in case.lines("settling"):
        answer = case.answers.get((line.process, line.run))
        if line.state in TERMINAL and answer is not None and answer.number == len(line.rows):
            for notification, slot, term in line.rows:
                ends.setdefault(notification, (answer.at, slot, term))
    for run in case.runs:
        at, slot, term = ends.get(run.line.notification, (NEVER, "", 0))
        reopened = case.reopened.get(run.line.notification, ())
        if run.line.decided <= at or not term or any(time < run.line.decided for time in reopened):
            continue
        knows = run.line.term >= term
        if run.slot != slot:  # the row has moved to a different partition in between
            knows = not case.superseded(run.slot, run.line.term, run.line.decided)
        if knows:
            yield f"{run} was decided on {(run.line.decided - at) / 1e9:.3f} s after the notification's end was written"


def _released_too_early(case: Case) -> Iterator[str]:
    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in case.runs:
        runs[run.line.process, lock_of(run.slot)].append(run)
    for line in case.lines("released"):
        for run in (run for lock in line.locks for run in runs.get((line.process, lock), ())):
            if run.line.at < line.at < run.end and run.line.how != "ignore":
                yield f"{line.process} gave back the lock of {run.slot} while {run} went on"


# --- 6: in order ---------------------------------------------------------------------------------


def _in_order(case: Case) -> Iterator[str]:
    keys: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in case.runs:
        if case.handlers[run.line.handler].is_ordered and run.line.key:
            keys[run.line.handler, run.line.key].append(run)
    for (_, key), runs in keys.items():
        yield from _overlaps(case, runs, f"key {key}")
        yield from _overtakings(runs, case.first_ends, key)


def _overtakings(runs: Sequence[Run], ends: Mapping[str, int], key: str) -> Iterator[str]:
    latest, last, before = 0, "", list[Run]()
    in_order = sorted(runs, key=lambda run: run.line.sequence)
    for _, same in groupby(in_order, key=lambda run: run.line.sequence):
        some = list(same)
        for run in some:
            if run.line.at < latest and not any(run.is_same_call(former) for former in before):
                yield f"{run} overtook event {last} in key {key}"
        line = some[0].line
        end = ends.get(line.notification, NEVER)
        if end > latest:
            latest, last, before = end, line.event, some


# --- 7: nothing is left --------------------------------------------------------------------------


def _nothing_is_left(case: Case) -> Iterator[str]:
    yield from case.final.left
    for event in case.final.events:
        if not event.delivered and event.type in case.kinds:
            yield f"event {event.id} was never fanned out"
    for owed in case.final.notifications:
        if owed.state not in TERMINAL:
            yield f"the notification of event {owed.event} for {owed.handler} is still {owed.state}"
    for line in case.lines("tasks"):
        yield f"{line.process} left the task {line.how}"
    yield from _miscounted(case)
    yield from _uncounted(case)


def _uncounted(case: Case) -> Iterator[str]:
    """The runs that count fewer attempts than failed before. Only the handler's own errors use attempts."""
    failed: dict[tuple[str, str], list[int]] = defaultdict(list)
    for run in case.runs:
        if run.how.startswith("failed: ValueError") and not case.handlers[run.line.handler].in_batches:
            failed[run.line.process, run.line.notification].append(run.end)
    written: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
    for line in case.lines("settling"):
        answer = case.answers.get((line.process, line.run))
        if line.state != "FAILED" or answer is None or answer.number < len(line.rows):
            continue
        for notification, slot, term in line.rows:
            ends = failed[line.process, notification]
            if any(end <= line.at for end in ends):
                failed[line.process, notification] = [end for end in ends if end > line.at]
                written[notification].append((answer.at, slot, term))
    for run in case.runs:
        line = run.line
        before = [row for row in written.get(line.notification, ()) if row[0] < line.decided]
        known = sum(slot == run.slot and term <= line.term for _, slot, term in before)
        if known and line.attempt <= known and line.notification not in case.reopened:
            yield f"{run} was attempt {line.attempt}, after {known} attempts had failed"


def _miscounted(case: Case) -> Iterator[str]:
    written: Counter[tuple[str, str]] = Counter()
    for line in case.lines("settling"):
        written[line.process, line.state.lower()] += case.outcomes.get((line.process, line.run), 0)
    for line in case.lines("counters"):
        for state in ("succeeded", "failed", "dead", "expired"):
            counted, happened = line.counters.get(state, 0), written[line.process, state]
            if counted != happened:
                yield f"{line.process} counted {counted} notifications as {state}, and wrote {happened}"


# --- 8: at most once -----------------------------------------------------------------------------


def _at_most_once(case: Case) -> Iterator[str]:
    starts = Counter(line.notification for line in case.lines("start") if case.handlers[line.handler].only_once)
    for notification, number in starts.items():
        if number > 1 + len(case.reopened.get(notification, ())):
            yield f"notification {notification} of a handler that may run only once started {number} times"


_CHECKS: Mapping[int, Callable[[Case], Iterator[str]]] = {
    1: _nothing_is_lost,
    2: _all_or_nothing,
    3: _exactly_one_effect,
    4: _only_under_newest_term,
    5: _one_at_a_time,
    6: _in_order,
    7: _nothing_is_left,
    8: _at_most_once,
    9: owned_again,
    10: left_to_others,
}
