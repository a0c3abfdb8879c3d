"""The rules of the verdict: each finds a fault in the facts of a shard. Pure functions, the worst fault first.

A fault is told once. A handler that no process holds is behind as well, and only the missing holder is told: that is
the fault that an operator has to mend (decision 45).
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

from msgspec.structs import replace

from outboxio.handlers.options import LONGEST_UNSEEN
from outboxio.operations.overview.facts import FailedOperation, HandlerFacts, ShardFacts
from outboxio.operations.overview.job_rules import job_failing, job_late, job_stuck, late_jobs
from outboxio.operations.overview.values import MOST, Finding, Level
from outboxio.operations.overview.wording import counted, listed, of, past, spoken, waiting

UNHELD_FOR = timedelta(seconds=30)
FANOUT_BEHIND = timedelta(seconds=30)
FAILING_WITHIN = timedelta(minutes=5)
FAILING_SHARE, FAILING_RUNS = 0.5, 10
PAUSED_LONG = timedelta(days=1)
CLOCK_OFF = 2.0  # seconds
_MOST_VERSIONS = 3
JUST_ANNOUNCED = LONGEST_UNSEEN + UNHELD_FOR
"""A process that runs has announced its handlers within this time."""

Rule = Callable[[ShardFacts], Iterable[Finding]]


def findings_of(facts: ShardFacts) -> list[Finding]:
    """What is wrong with a shard, the worst first."""
    return [finding for rule in RULES for finding in rule(facts)]


# --- the shard -----------------------------------------------------------------------------------


def shard_unreachable(facts: ShardFacts) -> Iterator[Finding]:
    """The database does not answer."""
    if facts.error is not None:
        sentence = f"Shard `{facts.name}` cannot be reached: {facts.error}"
        yield _finding(facts, "shard_unreachable", sentence, "outboxio check", level="down")


def schema_behind(facts: ShardFacts) -> Iterator[Finding]:
    """Tables, columns or indexes are missing, or of a newer version."""
    if facts.schema is not None:
        sentence = f"The tables of shard `{facts.name}` do not fit this version of outboxio: {facts.schema}"
        yield _finding(facts, "schema_behind", sentence, "outboxio migrate", level="down")


def no_instance(facts: ShardFacts) -> Iterator[Finding]:
    """No process is in ``running()``, although handlers, events or due jobs are there."""
    late = late_jobs(facts)
    has_work = late or facts.undelivered or any(handler.last_seen is not None for handler in facts.handlers)
    if not facts.is_known or not has_work or any(instance.is_alive for instance in facts.instances):
        return
    seen = max((instance.last_seen for instance in facts.instances), default=None)
    when = "" if seen is None else f", and the last was seen {past(facts.age(seen))}"
    what = "events, notifications and jobs" if late else "events and notifications"
    sentence = f"No process works{when}: {what} wait."
    yield _finding(facts, "no_instance", sentence, "outboxio worker module:outbox", level="down")


def clock_off(facts: ShardFacts) -> Iterator[Finding]:
    """A machine and the database differ about the time."""
    offsets = {instance.instance: instance.report.clock_offset for instance in facts.instances if instance.is_alive}
    if facts.clock_offset is not None and facts.error is None:
        offsets.setdefault("this machine", facts.clock_offset)
    for name, offset in sorted(_by_host(offsets).items()):
        if abs(offset) > CLOCK_OFF:
            way = "ahead of" if offset > 0 else "behind"
            sentence = f"The clock of {name} is {spoken(abs(offset))} {way} the clock of the database."
            yield _finding(facts, "clock_off", sentence, "timedatectl status")


# --- locks ---------------------------------------------------------------------------------------


def lock_without_holder(facts: ShardFacts) -> Iterator[Finding]:
    """No process holds fan-out, or a handler, and work has waited for more than 30 s."""
    if is_fanout_unheld(facts):
        sentence = f"No process holds fan-out: {waiting(_undelivered(facts), 'event')}."
        yield _finding(facts, "lock_without_holder", sentence, "outboxio locks")
    for handler in facts.handlers:
        if is_unheld(facts, handler):
            waits = f": {waiting(handler.due, 'notification')}" if handler.due else ""
            sentence = f"No process holds `{handler.name}`{waits}."
            yield _finding(facts, "lock_without_holder", sentence, "outboxio locks", handler)


def partition_unowned(facts: ShardFacts) -> Iterator[Finding]:
    """A partition of a held handler has due notifications, and no process holds the partition."""
    for handler in facts.handlers:
        if handler.unowned_due and handler.is_held:
            numbers = ", ".join(map(str, sorted(handler.unowned_due)))
            noun = "Partition" if len(handler.unowned_due) == 1 else "Partitions"
            sentence = f"{noun} {numbers} of `{handler.name}`: notifications are due, and no process holds the lock."
            yield _finding(facts, "partition_unowned", sentence, f"outboxio partitions {_word(handler.name)}", handler)


# --- backlogs ------------------------------------------------------------------------------------


def fanout_behind(facts: ShardFacts) -> Iterator[Finding]:
    """An event that a handler wants has waited for fan-out for more than 30 s."""
    oldest = _oldest_undelivered(facts)
    if oldest is not None and oldest > FANOUT_BEHIND.total_seconds() and not is_fanout_unheld(facts):
        number = _undelivered(facts)
        sentence = f"Fan-out is behind: the oldest event has waited for {spoken(oldest)}, {counted(number)} wait."
        yield _finding(facts, "fanout_behind", sentence, "outboxio status")


def handler_behind(facts: ShardFacts) -> Iterator[Finding]:
    """A notification has been due for longer than the handler's ``alert_age``."""
    for handler in facts.handlers:
        if handler.oldest_due is None or handler.paused_since is not None or is_unheld(facts, handler):
            continue
        age = facts.age(handler.oldest_due)
        if age > handler.alert_age.total_seconds():
            sentence = f"`{handler.name}` is behind: oldest due {spoken(age)}, {counted(handler.due)} waiting."
            yield _finding(facts, "handler_behind", sentence, f"outboxio list --handler {_word(handler.name)}", handler)


def handler_failing(facts: ShardFacts) -> Iterator[Finding]:
    """More than half of at least 10 runs have failed within 5 minutes."""
    for handler in facts.handlers:
        runs, share = failures(facts, handler)
        if runs >= FAILING_RUNS and share > FAILING_SHARE:
            error = "" if handler.last_error is None else f": {handler.last_error}"
            sentence = f"`{handler.name}` fails {share:.0%} of {runs:,} runs of the last 5 minutes{error}."
            remedy = f"outboxio dead --state FAILED --handler {_word(handler.name)}"
            yield _finding(facts, "handler_failing", sentence, remedy, handler)


def handler_resting(facts: ShardFacts) -> Iterator[Finding]:
    """A handler rests, because a service that the handler needs is unavailable."""
    for instance in facts.instances:
        for name, rest in sorted(instance.resting.items()):
            if instance.is_alive:
                since = spoken(facts.age(rest.since))
                sentence = f"`{name}` has rested for {since} in process {instance.instance}: {rest.reason}."
                yield _finding(facts, "handler_resting", sentence, "outboxio instances", _named(facts, name))


# --- what needs a person -------------------------------------------------------------------------


def new_dead(facts: ShardFacts) -> Iterator[Finding]:
    """Notifications have ended DEAD or EXPIRED within the last hour."""
    for handler in facts.handlers:
        if handler.dead_hour and handler.newest_dead is not None:
            ended = of(handler.dead_hour, "notification")
            last = past(facts.age(handler.newest_dead))
            sentence = f"{ended} of `{handler.name}` ended DEAD or EXPIRED within the last hour, the last {last}."
            yield _finding(facts, "new_dead", sentence, f"outboxio dead --handler {_word(handler.name)}", handler)


def parked_keys(facts: ShardFacts) -> Iterator[Finding]:
    """Ordering keys wait for an operator."""
    for handler in facts.handlers:
        if handler.parked:
            number, behind = len(handler.parked), sum(key.blocked for key in handler.parked)
            are = "is" if number == 1 else "are"
            sentence = (
                f"{of(number, 'key', 100)} of `{handler.name}` {are} parked by a dead letter, and "
                f"{waiting(behind, 'notification')} behind."
            )
            yield _finding(facts, "parked_keys", sentence, "outboxio keys", handler)


def stuck_runs(facts: ShardFacts) -> Iterator[Finding]:
    """Runs ignore their cancellation."""
    for instance in facts.instances:
        for name, number in sorted(instance.stuck.items()):
            if instance.is_alive:
                are = "is" if number == 1 else "are"
                sentence = f"{of(number, 'run')} of `{name}` {are} stuck in process {instance.instance}."
                yield _finding(facts, "stuck_runs", sentence, "outboxio instances", _named(facts, name))


def unroutable(facts: ShardFacts) -> Iterator[Finding]:
    """Notifications wait under a name that no process has, or for a version of their event that no process has."""
    for handler in facts.handlers:
        if handler.deferred:
            remedy = f"outboxio list --handler {_word(handler.name)} --type {_word(handler.deferred[0].event_type)}"
            yield _finding(facts, "unroutable", _deferred(handler), remedy, handler)
    for name, number in sorted(facts.unroutable.items()):
        wait = "waits" if number == 1 else "wait"
        sentence = f"{of(number, 'notification')} of `{name}` {wait}, and no process has such a handler."
        yield _finding(facts, "unroutable", sentence, f"outboxio skip --handler {_word(name)} --dry-run")


def event_without_handler(facts: ShardFacts) -> Iterator[Finding]:
    """Events wait that no handler wants."""
    if not facts.handlers or (facts.has_topics and is_fanout_unheld(facts)):
        return  # without any handler, other tools read the events
    unwanted = {
        name: events
        for name, events in facts.undelivered.items()
        if name not in facts.wanted_types
        and events.oldest is not None
        and facts.age(events.oldest) > FANOUT_BEHIND.total_seconds()
    }
    if unwanted:
        number = sum(events.number for events in unwanted.values())
        types = f"{len(unwanted)} event type{' has' if len(unwanted) == 1 else 's have'}"
        sentence = f"{types} no handler anywhere: {listed(sorted(unwanted))}. {waiting(number, 'event')}."
        yield _finding(facts, "event_without_handler", sentence, "outboxio events")


def paused_long(facts: ShardFacts) -> Iterator[Finding]:
    """A handler or a job has been paused for more than a day."""
    for handler in facts.handlers:
        if handler.paused_since is not None and facts.age(handler.paused_since) > PAUSED_LONG.total_seconds():
            age = spoken(facts.age(handler.paused_since))
            sentence = f"`{handler.name}` has been paused for {age}, {counted(handler.due)} waiting."
            yield _finding(facts, "paused_long", sentence, f"outboxio unpause {_word(handler.name)}", handler)
    for job in facts.jobs:
        if job.paused_date is not None and facts.age(job.paused_date) > PAUSED_LONG.total_seconds():
            sentence = f"Job `{job.name}` has been paused for {spoken(facts.age(job.paused_date))}."
            finding = _finding(facts, "paused_long", sentence, f"outboxio jobs --unpause {_word(job.name)}")
            yield replace(finding, job=job.name)


def operation_failed(facts: ShardFacts) -> Iterator[Finding]:
    """An order of an operator has failed within the last hour."""
    for operation in facts.failed_operations:
        yield _finding(facts, "operation_failed", _told(operation), "outboxio operations")


RULES: tuple[Rule, ...] = (
    shard_unreachable, schema_behind, no_instance, lock_without_holder, fanout_behind, handler_behind, handler_failing,
    handler_resting, job_late, job_failing, new_dead, parked_keys, stuck_runs, job_stuck, unroutable,
    event_without_handler, paused_long, clock_off, partition_unowned, operation_failed,
)  # fmt: skip
"""All rules, the worst fault first."""

RULE_NAMES = tuple(rule.__name__ for rule in RULES)


# --- what several rules ask ----------------------------------------------------------------------


def is_fanout_unheld(facts: ShardFacts) -> bool:
    """True if no process holds fan-out, and a wanted event has waited for more than 30 s."""
    oldest = _oldest_undelivered(facts)
    return not facts.fanout.is_held and oldest is not None and oldest > UNHELD_FOR.total_seconds()


def is_unheld(facts: ShardFacts, handler: HandlerFacts) -> bool:
    """True if no process holds a handler that should be held.

    Either a notification has been due for more than 30 s, or a process with the handler runs, and the holder has been
    silent for more than 30 s. A handler without work that no process has needs no holder.
    """
    if handler.is_held or not facts.is_known:
        return False
    if handler.oldest_due is not None and facts.age(handler.oldest_due) > UNHELD_FOR.total_seconds():
        return True
    is_announced = handler.last_seen is not None and facts.age(handler.last_seen) < JUST_ANNOUNCED.total_seconds()
    return is_announced and any(lock.is_dead for lock in handler.locks)


def failures(facts: ShardFacts, handler: HandlerFacts) -> tuple[int, float]:
    """The runs of the last 5 minutes, and the share of failures."""
    minutes = handler.minutes_since(facts.now - FAILING_WITHIN)
    failed = sum(minute.failed + minute.dead + minute.expired for minute in minutes)
    runs = failed + sum(minute.succeeded for minute in minutes)
    return runs, failed / runs if runs else 0.0


def _deferred(handler: HandlerFacts) -> str:
    """The notifications that wait for newer versions of events, the three versions with the most by name."""
    numbers = Counter[tuple[str, int]]()
    for one in handler.deferred:
        numbers[one.event_type, one.version] += one.number
    number, several = numbers.total(), len(numbers) > 1
    versions = ", ".join(
        f"version {version} of `{event_type}`{f' ({counted(each)})' if several else ''}"
        for (event_type, version), each in numbers.most_common(_MOST_VERSIONS)
    )
    more = f" and {len(numbers) - _MOST_VERSIONS} more" if len(numbers) > _MOST_VERSIONS else ""
    return (
        f"{of(min(MOST, number), 'notification')} of `{handler.name}` {'waits' if number == 1 else 'wait'} for "
        f"{versions}{more}, and no process that runs the handler has {'them' if several else 'it'}: deploy the newer "
        "code to the processes that run handlers."
    )


def _undelivered(facts: ShardFacts) -> int:
    """The undelivered events that a handler wants."""
    return sum(events.number for name, events in facts.undelivered.items() if name in facts.wanted_types)


def _oldest_undelivered(facts: ShardFacts) -> float | None:
    """The seconds for which the first undelivered event that a handler wants has waited."""
    wanted = facts.wanted_types
    ages = [
        facts.age(events.oldest)
        for name, events in facts.undelivered.items()
        if name in wanted and events.oldest is not None
    ]
    return max(ages, default=None)


def _named(facts: ShardFacts, name: str) -> HandlerFacts | None:
    return next((handler for handler in facts.handlers if handler.name == name), None)


def _by_host(offsets: dict[str, float | None]) -> dict[str, float]:
    """The offset of each machine. The name of a process begins with its machine."""
    return {name.partition(":")[0]: offset for name, offset in offsets.items() if offset is not None}


def _told(operation: FailedOperation) -> str:
    return f"An order has failed: {operation.kind} by {operation.actor}: {operation.error}"


def _word(name: str) -> str:
    """A name as a word of a command line."""
    return shlex.quote(name)


def _finding(
    facts: ShardFacts,
    rule: str,
    sentence: str,
    remedy: str,
    handler: HandlerFacts | None = None,
    *,
    level: Level = "degraded",
) -> Finding:
    name = None if handler is None else handler.name
    return Finding(rule=rule, level=level, sentence=sentence, remedy=remedy, handler=name, shard=facts.name)
