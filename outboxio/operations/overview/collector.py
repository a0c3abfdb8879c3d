"""Reads the facts of a shard: about 15 short statements, each bounded.

The overview may be read in a process without the handlers, such as a command line with a URL. So the handlers are those
of ``subscriptions``, and the options are those of the reports of processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from msgspec.structs import replace

from outboxio.errors import DatabaseUnavailable, SchemaError, SchemaNewer
from outboxio.handlers.handler import HandlerRegistry
from outboxio.model.lock_name import LockName, Slot
from outboxio.model.notification import State
from outboxio.model.operating.groups import Search
from outboxio.model.operating.operation import OperationState
from outboxio.model.redaction import Redact, redacted_error
from outboxio.operations.overview.facts import FailedOperation, HandlerFacts, InstanceFacts, LockFacts, ShardFacts
from outboxio.operations.overview.readings import KnownHandlers, Readings, alert_ages, instance_facts, lock_facts
from outboxio.operations.overview.rules import FAILING_RUNS, FAILING_SHARE, failures
from outboxio.operations.overview.values import MOST
from outboxio.operations.overview.wording import brief
from outboxio.operations.partitions.owners import counts_of
from outboxio.operations.recorder import AdminShard
from outboxio.settings import Settings
from outboxio.storage.protocols import Announced
from outboxio.support import machine
from outboxio.support.clock import utc_now
from outboxio.support.text import without_passwords

PATIENCE = 5.0  # seconds for all questions to a shard
CHECKED_AGAIN = 60.0  # seconds between two complete checks of the tables
HOUR = timedelta(hours=1)
MOST_KEYS = 100
_INSTANCES_FOR = timedelta(minutes=10)  # the time for which a dead process is shown
_OPERATIONS = 20
_UNOWNED_FOR = timedelta(seconds=5)

_FAILURES = (State.FAILED, State.DEAD, State.EXPIRED, State.DYING)


def _unreachable(error: Exception) -> str:
    """Why a shard cannot be reached. The address is kept whole, so the reason behind it is not cut off."""
    if not isinstance(error, DatabaseUnavailable):
        return brief(without_passwords(str(error) or type(error).__name__))
    before = str(error).removesuffix(error.reason)
    return without_passwords(before.removeprefix(f"shard {error.shard!r} at ") + brief(error.reason))


class Collector:
    """Reads the facts of a shard."""

    def __init__(
        self, namespace: str, one: AdminShard, settings: Settings, handlers: HandlerRegistry, redact: Redact
    ) -> None:
        self._namespace = namespace
        self._one = one
        self._database = one.database
        self._settings = settings
        self._handlers = handlers
        self._redact = redact
        self._checked_at = float("-inf")
        self._pending: Sequence[str] = ()

    async def collect(self) -> ShardFacts:
        """The facts. A shard that cannot be reached, or lacks tables, is a fact, and no error."""
        began = machine.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                facts = await self._collect()
        except TimeoutError:
            facts = self._without(error=f"no answer within {PATIENCE:g} s")
        except SchemaError as error:
            facts = self._without(schema=str(error))
        except Exception as error:
            if self._database.lacks_schema(error):
                facts = self._without(schema=f"{error}. Tables or columns are missing")
            elif isinstance(error, DatabaseUnavailable) or self._database.is_unreachable(error):
                facts = self._without(error=_unreachable(error))
            else:
                raise
        return replace(facts, took=machine.monotonic() - began)

    def _without(self, *, error: str | None = None, schema: str | None = None) -> ShardFacts:
        self._checked_at = float("-inf")
        return ShardFacts(name=self._database.name, now=self._one.clock(), error=error, schema=schema)

    async def _collect(self) -> ShardFacts:
        pending = await self._check()
        now, offset = await self._now()
        known = await self._known(now)
        instances = await self._instances(now)
        undelivered = await self._database.probes.undelivered(self._namespace, now, MOST)
        handlers = await self._read_handlers(known, instances, now)
        jobs = await self._database.jobs.faulty(self._namespace, now)
        facts = ShardFacts(
            name=self._database.name, now=now, pending=pending, clock_offset=offset, handlers=handlers,
            fanout=await self._fanout(instances, now), undelivered=undelivered,
            unroutable=await self._unroutable(known, now), instances=instances,
            failed_operations=await self._failed_operations(now),
            jobs=[redacted_error(job, self._redact) for job in jobs],
        )  # fmt: skip
        return replace(facts, handlers=[await self._with_error(facts, one) for one in handlers])

    async def _check(self) -> Sequence[str]:
        """Check the tables at most once a minute. Returns the contract files that wait."""
        if machine.monotonic() - self._checked_at >= CHECKED_AGAIN:
            with suppress(SchemaNewer):  # during a deployment, this process is the older one and goes on
                await self._database.schema.check()
            self._pending = await self._database.schema.pending()
            self._checked_at = machine.monotonic()
        return self._pending

    async def _now(self) -> tuple[datetime, float | None]:
        """The moment by the clock that outboxio goes by, and the offset of this machine's wall clock, in seconds."""
        asked, said, answered = utc_now(), await self._database.now(), utc_now()
        if self._one.clock.is_given:
            return self._one.clock(), None
        await self._one.measure()
        slow, fast = (asked - said).total_seconds(), (answered - said).total_seconds()
        return self._one.clock(), 0.0 if slow <= 0 <= fast else min(slow, fast, key=abs)

    async def _known(self, now: datetime) -> KnownHandlers:
        seen_since = now - self._settings.subscription_ttl
        handlers: dict[str, list[Announced]] = {}
        for one in await self._database.subscriptions.announced(self._namespace):
            if one.last_seen_date > seen_since:
                handlers.setdefault(one.handler_name, []).append(one)
        return KnownHandlers(handlers, await counts_of(self._database, self._namespace))

    # --- processes and locks -----------------------------------------------------------------------

    async def _instances(self, now: datetime) -> list[InstanceFacts]:
        reports = await self._database.reports.reports(self._namespace, now - _INSTANCES_FOR)
        return [instance_facts(one, now, self._redact) for one in reports]

    async def _fanout(self, instances: Sequence[InstanceFacts], now: datetime) -> LockFacts:
        lock = LockName(self._namespace, "fanout")
        holders = await self._database.subscriptions.holders([lock])
        return lock_facts(0, holders.get(lock), instances, now, is_announced=False)

    # --- handlers ----------------------------------------------------------------------------------

    async def _read_handlers(
        self, known: KnownHandlers, instances: Sequence[InstanceFacts], now: datetime
    ) -> list[HandlerFacts]:
        if not known.handlers:
            return []
        namespace, probes, subscriptions = self._namespace, self._database.probes, self._database.subscriptions
        families = [known.names_of(handler) for handler in known.handlers]
        locks = [LockName(namespace, "dispatch", *slot) for slot in known.slots(known.handlers)]
        ended = sorted(known.names & set(await probes.dead_names(namespace)))
        readings = Readings(
            now=now,
            instances=instances,
            due=await probes.due(namespace, known.slots(known.names), now, MOST),
            deferred=await self._database.deferred.count(namespace, known.slots(known.names), MOST),
            blocked=await probes.blocked(namespace, sorted(known.names), MOST),
            dead=await probes.dead(namespace, ended, now - HOUR, MOST) if ended else (),
            parked=await probes.parked(namespace, families, MOST_KEYS) if ended else (),
            locks=locks,
            holders=await subscriptions.holders(locks),
            pauses=await subscriptions.pauses(namespace),
            minutes=await self._database.reports.minutes(namespace, now - HOUR),
            alert_ages=alert_ages(instances, self._handlers),
        )
        made = [readings.facts(known, handler) for handler in known.handlers]
        return [replace(one, unowned_due=await self._unowned_due(one.name, one.locks, now)) for one in made]

    async def _unowned_due(self, handler: str, locks: Sequence[LockFacts], now: datetime) -> list[int]:
        """The partitions that no process holds, although the handler is held, and that had due rows 5 s ago."""
        unheld = [lock.partition for lock in locks if not lock.is_held]
        if not unheld or len(unheld) == len(locks):
            return []
        long_ago = now - _UNOWNED_FOR
        any_due = self._database.stored_notifications.any_due
        return [number for number in unheld if await any_due(self._namespace, long_ago, [Slot(handler, number)])]

    async def _with_error(self, facts: ShardFacts, handler: HandlerFacts) -> HandlerFacts:
        """The handler with its newest error, if it fails."""
        runs, share = failures(facts, handler)
        if runs < FAILING_RUNS or share <= FAILING_SHARE:
            return handler
        search = Search(states=_FAILURES, names=(handler.name, *handler.aliases))
        errors = (await self._database.search.last_errors(self._namespace, search, 1)).rows
        told = brief(self._redact(f"{errors[0].type}: {errors[0].message}")) if errors else None
        return replace(handler, last_error=told)

    async def _unroutable(self, known: KnownHandlers, now: datetime) -> dict[str, int]:
        """Unfinished notifications of names that no process has announced within ``subscription_ttl``."""
        unfinished = set(await self._database.stored_notifications.unfinished_names(self._namespace))
        names = sorted(unfinished - known.names)
        if not names:
            return {}
        slots = known.slots(names)
        numbers = dict.fromkeys(names, 0)
        for due in await self._database.probes.due(self._namespace, slots, now, MOST):
            numbers[due.handler_name] += due.due + due.waiting
        for deferred in await self._database.deferred.count(self._namespace, slots, MOST):
            numbers[deferred.handler_name] += deferred.number
        for name, blocked in (await self._database.probes.blocked(self._namespace, names, MOST)).items():
            numbers[name] += blocked.number
        return {name: min(MOST, number) for name, number in numbers.items()}

    async def _failed_operations(self, now: datetime) -> list[FailedOperation]:
        newest = await self._database.operations.select(self._namespace, _OPERATIONS, None)
        return [
            FailedOperation(one.kind, one.actor, brief(one.error or "no reason is known"), str(one.id))
            for one in (redacted_error(each, self._redact) for each in newest)
            if one.state is OperationState.FAILED and one.updated_date > now - HOUR
        ]
