"""The processes of the outbox, and the locks that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS, handler_names
from outboxio.dashboard.pages.handlers import links_of, overview_for
from outboxio.dashboard.showing.shown import STATES, TERMS
from outboxio.dashboard.view import View
from outboxio.health.values import Finding, InstanceStatus, KeyStatus, LockStatus, ShardStatus
from outboxio.model.operating.operation import JobRow, Operation
from outboxio.operations.jobs import holders_of
from outboxio.operations.partitions.owners import in_ranges
from outboxio.support.codec import made_from
from outboxio.support.duration import format_duration

_OF_INSTANCES = ("no_instance", "lock_without_holder", "pool_exhausted", "stuck_runs", "clock_off")


class LockRow(Struct, frozen=True, kw_only=True):
    """The locks of a handler, or of fan-out, that a process holds, or that no process holds."""

    shard: str
    role: str
    """``fanout``, ``jobs`` or ``dispatch``."""
    handler_name: str | None
    """``None`` for the locks of fan-out and of jobs."""
    partitions: str
    """The numbers of the partitions: ``0-3, 7``. Empty for fan-out, and for a handler with a single partition."""
    owner: str | None
    since: datetime | None
    """The moment at which the first of these locks was taken."""
    is_alive: bool | None
    """True if the owner has reported within three delays; ``None`` without a report, or without an owner."""


class InstancesFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    instances: tuple[InstanceStatus, ...]
    locks: list[LockRow]
    findings: tuple[Finding, ...]
    """What is wrong with processes and locks."""


async def instances(asked: Asked) -> View:
    """The processes by their own reports, and who holds which lock."""
    refuse_unknown_words(asked.query, OTHER_WORDS)
    overview = await overview_for(asked)
    facts = InstancesFacts(
        instances=overview.instances,
        locks=_rows(await asked.admin.locks(shard=asked.shard)),
        findings=tuple(finding for finding in overview.findings if finding.rule in _OF_INSTANCES),
    )
    return View(
        template="instances.html",
        title="Instances and locks",
        facts=facts,
        shown={"links": links_of(facts.findings, asked)},
    )


def _rows(locks: Iterable[LockStatus]) -> list[LockRow]:
    """The locks, one row for all partitions of a handler with the same owner. Locks without an owner come first."""
    found: dict[tuple[str, str, str | None, str | None], list[LockStatus]] = {}
    parted: set[tuple[str, str | None]] = set()
    for lock in locks:
        if lock.partition:
            parted.add((lock.shard, lock.handler_name))
        found.setdefault((lock.shard, lock.role, lock.handler_name, lock.owner), []).append(lock)
    rows = [
        made_from(
            each[0], LockRow, partitions=in_ranges(lock.partition for lock in each) if (shard, name) in parted else "",
            since=min((lock.since for lock in each if lock.since is not None), default=None),
        )
        for (shard, _, name, _), each in found.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row.handler_name is not None, row.owner is not None, row.handler_name or ""))


# --- the databases of the outbox ------------------------------------------------------------------


_OF_SHARDS = ("shard_unreachable", "schema_behind", "fanout_behind", "event_without_handler", "clock_off", "unroutable")
_LOOKED_AT = 100


class ShardsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    shards: tuple[ShardStatus, ...]
    findings: tuple[Finding, ...]
    kept: Mapping[str, str]
    """For how long rows are kept, by the name of the setting."""
    last_purge: Operation | None
    """The newest purge by hand, among the newest 100 orders."""


async def shards(asked: Asked) -> View:
    """Each database: reachable or not, tables, fan-out, clock."""
    refuse_unknown_words(asked.query, OTHER_WORDS)
    overview, settings = await overview_for(asked), asked.outbox.settings
    is_up = any(shard.is_reachable and shard.schema is None for shard in overview.shards)
    orders: list[Operation] = await asked.admin.operations(_LOOKED_AT) if is_up and len(overview.shards) == 1 else []
    facts = ShardsFacts(
        shards=overview.shards,
        findings=tuple(finding for finding in overview.findings if finding.rule in _OF_SHARDS),
        kept={name: _kept(getattr(settings, name)) for name in ("keep_finished", "keep_dead")},
        last_purge=next((one for one in orders if one.kind == "purge"), None),
    )
    return View(template="shards.html", title="Shards", facts=facts, shown={"links": links_of(facts.findings, asked)})


def _kept(time: timedelta) -> str:
    return f"{time.days} days" if time.days > 1 and not time.seconds else format_duration(time)


# --- all jobs, by name: the last run, the next moment, and what an operator may order -------------


class JobsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    jobs: list[JobRow]
    holders: Mapping[str, str]
    """The process that runs each job, because it holds the lock of the job."""
    findings: tuple[Finding, ...]
    """What is wrong with jobs."""
    read_date: datetime


async def jobs(asked: Asked) -> View:
    """The jobs, those with a finding first."""
    refuse_unknown_words(asked.query, OTHER_WORDS)
    overview = await overview_for(asked)
    findings = tuple(finding for finding in overview.findings if finding.job is not None)
    wrong = {finding.job for finding in findings}
    found = await asked.admin.jobs()
    if not asked.access.may("payloads"):
        found = [replace(job, error=_type_of(job)) for job in found]
    facts = JobsFacts(
        jobs=sorted(found, key=lambda job: (job.name not in wrong, job.name)),
        holders=holders_of(found, await asked.admin.locks(), overview.instances),
        findings=findings,
        read_date=overview.read_date,
    )
    return View(
        template="jobs.html", title="Jobs", facts=facts,
        shown={"links": links_of(facts.findings, asked), "wrong": wrong},
    )  # fmt: skip


def _type_of(job: JobRow) -> str | None:
    """The error without its message, which may quote a payload. The text of an interruption is outboxio's own."""
    return job.error if job.error is None or job.result == "INTERRUPTED" else job.error.partition(":")[0]


# --- parked ordering keys -------------------------------------------------------------------------


MOST = 200


class KeysFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    keys: list[KeyStatus]
    """The longest parked first."""
    is_all: bool
    """False if there are more keys, or may be."""


async def keys(asked: Asked) -> View:
    """The parked keys of all handlers, or of one handler."""
    refuse_unknown_words(asked.query, ["handler", *OTHER_WORDS])
    name = asked.query.get("handler")
    found = list(await asked.admin.keys(name, limit=MOST + 1, shard=asked.shard))
    field: dict[str, Any] = {
        "name": "handler", "label": "Handler", "value": name, "options": await handler_names(asked, name),
    }  # fmt: skip
    facts = KeysFacts(keys=found[:MOST], is_all=len(found) <= MOST)
    return View(template="keys.html", title="Parked keys", facts=facts, shown={"around": [field]})


# --- the glossary: all words of the dashboard -----------------------------------------------------


async def glossary(asked: Asked) -> View:
    """The states and terms, each with its sentence."""
    return View(template="glossary.html", title="Glossary", facts={"states": STATES, "terms": TERMS}, refreshes=False)
