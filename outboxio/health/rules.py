"""The health rules, most severe first, as applied by status, doctor, the dashboard and the health endpoints.

A rule is a function without I/O that takes the facts of a shard or of this process, and yields a problem for each
fault. Insert a new rule according to its severity.

Each fault is reported once. A handler that no process holds is behind as well, but only the missing holder is
reported, as this is what an operator has to fix (decision 45).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from shlex import quote

from outboxio.health.engine import Problem, Rules
from outboxio.health.facts import JUST_ANNOUNCED, MOST_FAILING, HandlerFacts, ProcessFacts, ShardFacts
from outboxio.health.reasons import Reason, awaited_versions, counts_of
from outboxio.health.values import Phase, brief, counted, human_duration, listed, past, quantity, waiting
from outboxio.jobs.job import LATE
from outboxio.model.operating.operation import JobRow

HALF_A_MINUTE = timedelta(seconds=30)
CLOCK_OFF = 2.0  # seconds
FAILED_ROUNDS = 3  # in a row, from which a loop needs attention: a deadlock or two are normal
BLOCKED_FOR = 60.0  # seconds for which a blocked event loop is reported
_IN_TURN = (Reason.QUEUED, Reason.RATE, Reason.CONCURRENCY, Reason.BATCH)
"""The reasons of due rows that are only waiting for their turn: the handler's ``alert_age`` is their deadline."""

RULES = Rules()
"""All rules, most severe first. The name of a rule never changes, because alerts and the runbook use it."""


# --- shards and processes ------------------------------------------------------------------------


@RULES.add(level="down", of_process=True)
def process_ended(process: ProcessFacts) -> Iterator[Problem]:
    """A part of ``running()`` has ended or a loop has stopped: the process needs a restart."""
    yield from map(Problem, [*process.ended, *(text for shard in process.shards.values() for text in shard.dead)])


@RULES.add("outboxio check", level="down", see=("shards", "Shards"))
def shard_unreachable(facts: ShardFacts) -> Iterator[Problem]:
    """The database is unreachable."""
    if facts.here is not None:
        if facts.here.reachable is False and facts.here.schema not in ("missing", "newer"):
            yield Problem(f"shard {facts.name!r} cannot be reached")
    elif facts.error is not None:
        yield Problem(f"Shard `{facts.name}` cannot be reached: {facts.error}")


@RULES.add("outboxio migrate", level="down", see=("shards", "Shards"))
def schema_behind(facts: ShardFacts) -> Iterator[Problem]:
    """Tables, columns or indexes are missing, or belong to a newer version."""
    if facts.here is not None:
        tables, version = f"the tables of shard {facts.name!r}", "version of outboxio"
        if facts.here.schema == "missing":
            yield Problem(f"{tables} do not match this {version}: run outboxio check")
        if facts.here.schema == "newer":
            yield Problem(f"{tables} belong to a newer {version}: deploy that version")
    elif facts.schema is not None:
        yield Problem(f"The tables of shard `{facts.name}` do not match this version of outboxio: {facts.schema}")


@RULES.add("outboxio worker module:outbox", level="down", see=("instances", "Instances"))
def no_instance(facts: ShardFacts) -> Iterator[Problem]:
    """No process is in ``running()``, although there are handlers, events or due jobs."""
    is_running = bool(facts.alive) or (facts.here is not None and facts.here.in_running)
    late = _late_jobs(facts)
    if is_running or not (late or facts.undelivered or any(handler.last_seen for handler in facts.handlers)):
        return
    seen = max((instance.last_seen for instance in facts.instances), default=None)
    when = "" if seen is None else f" (last seen {past(facts.age(seen))})"
    what = "events, notifications and jobs" if late else "events and notifications"
    yield Problem(f"No process is running{when}: {what} are waiting.")


@RULES.add(of_process=True, unless=("shard_unreachable", "schema_behind"))
def tables_unknown(process: ProcessFacts) -> Iterator[Problem]:
    """The tables could not be read, so the rules about them were not applied."""
    if process.tables_unknown is not None:
        yield Problem(f"could not check the tables: {process.tables_unknown}")


@RULES.add("outboxio locks", see=("instances", "Instances and locks"))
def lock_without_holder(facts: ShardFacts) -> Iterator[Problem]:
    """No process holds fan-out, or a handler, and work has waited for more than 30 s."""
    if _is_fanout_unheld(facts):
        yield Problem(f"No process holds fan-out: {waiting(facts.wanted.number, 'event')}.")
    for handler in facts.handlers:
        number = counts_of(handler, handler, facts).get(Reason.NO_OWNER, 0)
        waits = f": {waiting(number, 'notification')}" if number else ""
        if _is_lost(facts, handler):
            yield Problem(f"No process holds `{handler.name}`{waits}.", handler.name)
        elif number:
            unheld = sorted({partition for partitions in handler.unheld.values() for partition in partitions})
            noun = "partition" if len(unheld) == 1 else "partitions"
            of = f"{noun} {', '.join(map(str, unheld))} of " if handler.is_held else ""
            text = f"No process holds {of}`{handler.name}`{waits}."
            yield Problem(text, handler.name, since=handler.oldest_unowned, after=HALF_A_MINUTE)


# --- backlogs and failures -----------------------------------------------------------------------


@RULES.add("outboxio status", after=HALF_A_MINUTE, see=("shards", "Shards"))
def fanout_behind(facts: ShardFacts) -> Iterator[Problem]:
    """An event with a subscribed handler has waited for fan-out for more than 30 s."""
    number, oldest = facts.wanted.number, facts.wanted.oldest
    if oldest is not None and not _is_fanout_unheld(facts):
        age = human_duration(facts.age(oldest))
        yield Problem(
            f"Fan-out is behind: the oldest event has been waiting for {age}, {counted(number)} waiting.", since=oldest
        )


@RULES.add("outboxio list --handler {handler}", see=("handler", "See the handler"))
def handler_behind(facts: ShardFacts) -> Iterator[Problem]:
    """A notification has been due for longer than the handler's ``alert_age``."""
    for handler in facts.handlers:
        counts, report = counts_of(handler, handler, facts), facts.reported(handler.name)
        reason = next((one for one in _IN_TURN if one in counts), None)
        if reason is not None and handler.oldest_due is not None:
            why = {
                Reason.RATE: f", limited to {report.limited_to}",
                Reason.CONCURRENCY: f", all {report.limit} concurrent runs are in use",
            }.get(reason, "")
            age = human_duration(facts.age(handler.oldest_due))
            text, fix = f"`{handler.name}` is behind: oldest due {age}, {counted(counts[reason])} waiting{why}.", ""
            if handler.lacks_locks:
                text += " No more partitions: automatic partitions have used up their share of the server's locks."
                fix = "outboxio check"
            after = handler.alert_age + timedelta(seconds=report.max_wait or 0.0)
            yield Problem(text, handler.name, fix=fix, since=handler.oldest_due, after=after)


@RULES.add("outboxio dead --state FAILED --handler {handler}", see=("handler", "See the handler"))
def handler_failing(facts: ShardFacts) -> Iterator[Problem]:
    """More than half of at least 10 runs have failed within 5 minutes."""
    for handler in facts.handlers:
        if handler.is_failing(facts.now):
            runs, share = handler.failures(facts.now)
            error = "" if handler.last_error is None else f": {handler.last_error}"
            text = f"`{handler.name}` failed {share:.0%} of {runs:,} runs in the last 5 minutes{error}."
            yield Problem(text, handler.name)


@RULES.add("outboxio list --state FAILED --handler {handler}", see=("handler", "See the handler"))
def failing_long(facts: ShardFacts) -> Iterator[Problem]:
    """A notification has been failing for longer than ``failing_alert_after``, and may block its ordering key."""
    for handler in facts.handlers:
        if (failing := handler.failing) is not None:
            fail = f"{quantity(failing.number, 'notification', MOST_FAILING)} of `{handler.name}`"
            have = "has" if failing.number == 1 else "have"
            text = f"{fail} {have} been failing for {human_duration(facts.age(failing.since))}: {failing.error}."
            if failing.keys and handler.blocked:
                keys = f"key{'' if len(failing.keys) == 1 else 's'} {listed(failing.keys)}"
                text += f" Later notifications of {keys} are blocked until it succeeds or is skipped."
            yield Problem(text, handler.name, since=failing.since)


@RULES.add("outboxio instances", see=("handler", "See the handler"))
def circuit_open(facts: ShardFacts) -> Iterator[Problem]:
    """The circuit breaker of a handler is open, because a service that the handler needs is unavailable."""
    for instance in facts.alive:
        for name, report in sorted(instance.report.handlers.items()):
            if report.circuit is not None:
                since = human_duration(facts.age(report.circuit.since))
                circuit = f"The circuit breaker of `{name}` has been open for {since} in process {instance.instance}"
                text = f"{circuit}: {report.circuit.reason}."
                yield Problem(text, _announced(facts, name))


@RULES.add("outboxio instances", after=HALF_A_MINUTE, see=("instances", "Instances"))
def pool_exhausted(facts: ShardFacts) -> Iterator[Problem]:
    """All connections of a process's pool have been in use for more than 30 s."""
    for instance in facts.alive:
        if (full := instance.report.full_pool) is not None:
            text = (
                f"All {full.size} connections of the pool of process {instance.instance} have been in use for "
                f"{human_duration(facts.age(full.since))}: actions and transactional handlers are waiting for one."
            )
            yield Problem(text, since=full.since)


@RULES.add("outboxio instances", see=("jobs", "Jobs"))
def job_late(facts: ShardFacts) -> Iterator[Problem]:
    """A job has been due for more than a minute, but no process runs it."""
    for job in _late_jobs(facts) if facts.alive else ():  # reported by no_instance otherwise
        due = human_duration(facts.age(job.due_date))
        text = f"Job `{job.name}` is late: it has been due for {due}, but no process runs it."
        if job.state == "RUNNING":
            text = f"Job `{job.name}` is late: process {job.instance} ended during the run, and no other took over."
        yield Problem(text, job=job.name)


@RULES.add("outboxio jobs --run {job}", see=("jobs", "Jobs"))
def job_failing(facts: ShardFacts) -> Iterator[Problem]:
    """The last run of a job failed and is not retried."""
    late = _late_jobs(facts)
    for job in facts.jobs:
        if job.has_failed and job.paused_date is None and job not in late and job.finished_date is not None:
            error = "" if not job.error else f": {brief(job.error.partition(chr(10))[0])}"
            after = "" if job.state == "RUNNING" else f", after {quantity(job.attempts, 'attempt')}"
            ended = past(facts.age(job.finished_date))
            yield Problem(f"Job `{job.name}` ended {job.result} {ended}{after}{error}.", job=job.name)


# --- what needs an operator -------------------------------------------------------------------------


@RULES.add("outboxio dead --handler {handler}", see=("dead", "See the dead letters"))
def new_dead(facts: ShardFacts) -> Iterator[Problem]:
    """Notifications have ended DEAD or EXPIRED within the last hour."""
    for handler in facts.handlers:
        if handler.dead_hour and handler.newest_dead is not None:
            ended, last = quantity(handler.dead_hour, "notification"), past(facts.age(handler.newest_dead))
            text = f"{ended} of `{handler.name}` ended DEAD or EXPIRED in the last hour, most recently {last}."
            yield Problem(text, handler.name)


@RULES.add("outboxio keys", see=("keys", "See the keys"))
def parked_keys(facts: ShardFacts) -> Iterator[Problem]:
    """Ordering keys are parked until an operator decides."""
    for handler in facts.handlers:
        if handler.parked:
            number, behind = len(handler.parked), sum(key.blocked for key in handler.parked)
            parked = f"{quantity(number, 'key', 100)} of `{handler.name}` {_are(number)} parked by a dead letter"
            yield Problem(f"{parked}, and {waiting(behind, 'notification')} behind.", handler.name)


@RULES.add("outboxio instances", see=("instances", "Instances"))
def stuck_runs(facts: ShardFacts) -> Iterator[Problem]:
    """Runs ignore their cancellation."""
    for instance in facts.alive:
        for name, report in sorted(instance.report.handlers.items()):
            if report.stuck:
                runs = f"{quantity(report.stuck, 'run')} of `{name}` {_are(report.stuck)}"
                yield Problem(f"{runs} stuck in process {instance.instance}.", _announced(facts, name))


@RULES.add("outboxio instances", after=timedelta(seconds=10), see=("jobs", "Jobs"))
def job_stuck(facts: ShardFacts) -> Iterator[Problem]:
    """The run of a job ignores its cancellation, 40 s or longer after its timeout."""
    for job in facts.jobs:
        if job.state == "RUNNING" and _is_alive(facts, job.instance) and job.started_date is not None:
            began = past(facts.age(job.started_date))
            text = (
                f"Job `{job.name}` is stuck in process {job.instance}: the run started {began} "
                "and ignores its cancellation."
            )
            yield Problem(text, job=job.name, since=job.due_date)


@RULES.add(see=("notifications", "See the notifications"))
def unroutable(facts: ShardFacts) -> Iterator[Problem]:
    """Notifications wait for a handler or an event version that no process has."""
    for handler in facts.handlers:
        counts = counts_of(handler, handler, facts)
        if Reason.VERSION in counts:
            fix = f"outboxio list --handler {quote(handler.name)} --type {quote(handler.deferred[0].event_type)}"
            yield Problem(awaited_versions(handler), handler.name, fix=fix)
        if number := counts.get(Reason.NO_HANDLER):
            yield _without_handler(handler.name, number, _successor(facts, handler))
    for name, number in sorted(facts.unroutable.items()):
        yield _without_handler(name, number)


@RULES.add("outboxio list --state PENDING --handler {handler}", see=("handler", "See the handler"))
def delayed_long(facts: ShardFacts) -> Iterator[Problem]:
    """A notification is delayed for more than a year, probably by mistake."""
    for handler in facts.handlers:
        if handler.far:
            far = f"{quantity(handler.far, 'notification')} of `{handler.name}` {_are(handler.far)}"
            yield Problem(f"{far} delayed for more than a year: `outboxio retry ID` runs one now.", handler.name)


@RULES.add("outboxio list-events", see=("events", "See the events"))
def event_without_handler(facts: ShardFacts) -> Iterator[Problem]:
    """Events are waiting, but no handler subscribes to them."""
    if not facts.handlers or (any(handler.topics for handler in facts.handlers) and _is_fanout_unheld(facts)):
        return  # without handlers, other tools read the events
    wanted = facts.wanted_types
    unwanted = {
        name: events.number
        for name, events in facts.undelivered.items()
        if name not in wanted and _is_older(facts, events.oldest, HALF_A_MINUTE)
    }
    if unwanted:
        types = f"{len(unwanted)} event type{' has' if len(unwanted) == 1 else 's have'}"
        waits = waiting(sum(unwanted.values()), "event")
        yield Problem(f"{types} no handler anywhere: {listed(sorted(unwanted))}. {waits}.")


@RULES.add("outboxio unpause {handler}", after=timedelta(days=1), see=("handler", "See the handler"))
def paused_long(facts: ShardFacts) -> Iterator[Problem]:
    """A handler or a job has been paused for more than a day."""
    for handler in facts.handlers:
        if handler.paused_since is not None:
            age = human_duration(facts.age(handler.paused_since))
            number = counts_of(handler, handler, facts).get(Reason.PAUSED, 0)
            text = f"`{handler.name}` has been paused for {age}, {counted(number)} waiting."
            yield Problem(text, handler.name, since=handler.paused_since)
    for job in facts.jobs:
        if job.paused_date is not None:
            text = f"Job `{job.name}` has been paused for {human_duration(facts.age(job.paused_date))}."
            fix = f"outboxio jobs --unpause {quote(job.name)}"
            yield Problem(text, job=job.name, fix=fix, since=job.paused_date)


@RULES.add("timedatectl status", see=("instances", "Instances"))
def clock_off(facts: ShardFacts) -> Iterator[Problem]:
    """The clock of a machine differs from the clock of the database by more than 2 s."""
    offsets = {"this machine": facts.clock_offset}
    offsets |= {instance.instance: instance.report.clock_offset for instance in facts.alive}
    hosts = {name.partition(":")[0]: offset for name, offset in offsets.items() if offset is not None}
    for host, offset in sorted(hosts.items()):
        if abs(offset) > CLOCK_OFF:
            way = "ahead of" if offset > 0 else "behind"
            yield Problem(f"The clock of {host} is {human_duration(abs(offset))} {way} the clock of the database.")


@RULES.add("outboxio operations", see=("operations", "Operations"))
def operation_failed(facts: ShardFacts) -> Iterator[Problem]:
    """An operation failed within the last hour."""
    for one in facts.failed_operations:
        error = brief(one.error or "no error was recorded")
        yield Problem(f"Operation failed: {one.kind} by {one.actor}: {error}")


# --- this process --------------------------------------------------------------------------------


@RULES.add(of_process=True)
def loop_failing(process: ProcessFacts) -> Iterator[Problem]:
    """The rounds of a loop keep failing."""
    for shard in process.shards.values():
        for name, loop in shard.loops.items() if shard.fit == "fits" else ():
            if loop.failures >= FAILED_ROUNDS:
                yield Problem(f"the loop {name!r} has failed {loop.failures} times in a row")


@RULES.add(of_process=True)
def runs_do_not_end(process: ProcessFacts) -> Iterator[Problem]:
    """Notifications are due, but no run finishes."""
    for name, shard in process.shards.items():
        if shard.is_stalled:
            yield Problem(
                f"shard {name!r}: no run has finished for 30 s, but notifications have been due for over 60 s"
            )


@RULES.add(of_process=True, unless=("circuit_open",))
def circuit_open_here(process: ProcessFacts) -> Iterator[Problem]:
    """The circuit breaker of a handler is open in this process, but its report does not show it yet."""
    for shard in process.shards.values():
        for handler, reason in shard.open_circuits.items():
            yield Problem(f"circuit breaker of handler {handler!r} is open: {reason}")


@RULES.add(of_process=True, unless=("stuck_runs",))
def stuck_runs_here(process: ProcessFacts) -> Iterator[Problem]:
    """Runs of this process ignore their cancellation."""
    if stuck := sum(shard.stuck for shard in process.shards.values()):
        yield Problem(f"{quantity(stuck, 'run')} {_are(stuck)} stuck in this process")


@RULES.add(of_process=True)
def event_loop_blocked(process: ProcessFacts) -> Iterator[Problem]:
    """The event loop was blocked within the last minute."""
    seconds, ago = process.blocked
    if ago <= BLOCKED_FOR:
        blocked = f"the event loop was blocked for {seconds:.1f} s, {ago:.0f} s ago"
        yield Problem(f"{blocked}: move blocking calls to asyncio.to_thread()")


NOT_RUNNING: Mapping[Phase, str] = {
    "stopped": "this process has not entered running()",
    "starting": "this process is entering running()",
    "leaving": "this process is leaving running() and starts no new runs",
}


@RULES.add(level="ok", of_process=True)
def not_running(process: ProcessFacts) -> Iterator[Problem]:
    """The process is not ready, which is not a fault."""
    if process.phase in NOT_RUNNING:
        yield Problem(NOT_RUNNING[process.phase])


RULE_NAMES = tuple(rule.name for rule in RULES if not rule.of_process)
"""The names of the rules about tables, as used in findings, alerts and the runbook."""


# --- conditions that several rules share ---------------------------------------------------------


def _is_older(facts: ShardFacts, time: datetime | None, than: timedelta) -> bool:
    return time is not None and facts.age(time) > than.total_seconds()


def _is_fanout_unheld(facts: ShardFacts) -> bool:
    """True if no process holds fan-out, and an event with a handler has waited for more than 30 s."""
    return not facts.fanout.is_held and _is_older(facts, facts.wanted.oldest, HALF_A_MINUTE)


def _is_lost(facts: ShardFacts, handler: HandlerFacts) -> bool:
    """True if a process with the handler runs, but the holder was last seen more than 30 s ago."""
    is_announced = handler.last_seen is not None and not _is_older(facts, handler.last_seen, JUST_ANNOUNCED)
    return not handler.is_held and is_announced and any(lock.is_dead for lock in handler.locks)


def _successor(facts: ShardFacts, gone: HandlerFacts) -> str | None:
    """Return the only handler with the same subscriptions, which ``gone`` may have been renamed to."""
    events = gone.event_types, gone.topics
    same = [one.name for one in facts.handlers if not one.is_gone and (one.event_types, one.topics) == events]
    return same[0] if len(same) == 1 else None


def _without_handler(name: str, number: int, successor: str | None = None) -> Problem:
    to = "the handler with its new name" if successor is None else f"`{successor}` if that is its new name"
    waits = f"{quantity(number, 'notification')} of `{name}` {'waits' if number == 1 else 'wait'}"
    text = f"{waits}, but no process has this handler: deploy it, or add `aliases={{{name!r}}}` to {to}."
    return Problem(text, name, fix=f"outboxio skip --handler {quote(name)} --dry-run")


def _late_jobs(facts: ShardFacts) -> list[JobRow]:
    """Return the jobs that have been due for more than a minute but are not running."""
    return [
        job
        for job in facts.jobs
        if (job.paused_date is None or job.ordered_date is not None)
        and _is_older(facts, job.due_date, LATE)
        and not (job.state == "RUNNING" and _is_alive(facts, job.instance))
    ]


def _is_alive(facts: ShardFacts, instance: str) -> bool:
    return any(one.instance == instance for one in facts.alive)


def _announced(facts: ShardFacts, name: str) -> str | None:
    """Return the name if a process has announced the handler."""
    return name if any(handler.name == name for handler in facts.handlers) else None


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
