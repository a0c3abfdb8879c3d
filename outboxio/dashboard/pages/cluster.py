"""Processes and locks, shards, jobs, parked keys, and the glossary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.filters import refuse_unknown_parameters
from outboxio.dashboard.lists import COMMON_PARAMETERS, handler_names
from outboxio.dashboard.page_request import PageRequest
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
    """The locks of a handler, of fan-out or of jobs with the same holder, or without a holder."""

    shard: str
    role: str
    """``fanout``, ``jobs`` or ``dispatch``."""
    handler_name: str | None
    """``None`` for the locks of fan-out and of jobs."""
    partitions: str
    """The numbers of the partitions: ``0-3, 7``. Empty for fan-out, and for a handler with a single partition."""
    owner: str | None
    since: datetime | None
    """When the first of these locks was taken."""
    is_alive: bool | None
    """True if the owner has reported within three intervals; ``None`` without a report, or without an owner."""


class InstancesFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    instances: tuple[InstanceStatus, ...]
    locks: list[LockRow]
    findings: tuple[Finding, ...]
    """What is wrong with processes and locks."""


async def instances(request: PageRequest) -> View:
    """Show the processes, as they report themselves, and the holders of the locks."""
    refuse_unknown_parameters(request.query, COMMON_PARAMETERS)
    overview = await overview_for(request)
    facts = InstancesFacts(
        instances=overview.instances,
        locks=_rows(await request.admin.locks(shard=request.shard)),
        findings=tuple(finding for finding in overview.findings if finding.rule in _OF_INSTANCES),
    )
    return View(
        template="instances.html",
        title="Instances and locks",
        facts=facts,
        shown={"links": links_of(facts.findings, request)},
    )


def _rows(locks: Iterable[LockStatus]) -> list[LockRow]:
    """Return one row for all partitions of a handler with the same owner. Locks without an owner come first."""
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
    """The newest manual purge, among the newest 100 operations."""


async def shards(request: PageRequest) -> View:
    """Show each database: reachability, tables, fan-out, clock."""
    refuse_unknown_parameters(request.query, COMMON_PARAMETERS)
    overview, settings = await overview_for(request), request.outbox.settings
    is_up = any(shard.is_reachable and shard.schema is None for shard in overview.shards)
    operations: list[Operation] = (
        await request.admin.operations(_LOOKED_AT) if is_up and len(overview.shards) == 1 else []
    )
    facts = ShardsFacts(
        shards=overview.shards,
        findings=tuple(finding for finding in overview.findings if finding.rule in _OF_SHARDS),
        kept={name: _kept(getattr(settings, name)) for name in ("keep_finished", "keep_dead")},
        last_purge=next((one for one in operations if one.kind == "purge"), None),
    )
    return View(template="shards.html", title="Shards", facts=facts, shown={"links": links_of(facts.findings, request)})


def _kept(time: timedelta) -> str:
    return f"{time.days} days" if time.days > 1 and not time.seconds else format_duration(time)


# --- jobs -----------------------------------------------------------------------------------------


class JobsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    jobs: list[JobRow]
    holders: Mapping[str, str]
    """The process that runs each job, because it holds the lock of the job."""
    findings: tuple[Finding, ...]
    """What is wrong with jobs."""
    read_date: datetime


async def jobs(request: PageRequest) -> View:
    """Show the jobs, those with a finding first."""
    refuse_unknown_parameters(request.query, COMMON_PARAMETERS)
    overview = await overview_for(request)
    findings = tuple(finding for finding in overview.findings if finding.job is not None)
    wrong = {finding.job for finding in findings}
    found = await request.admin.jobs()
    if not request.access.may("payloads"):
        found = [replace(job, error=_type_of(job)) for job in found]
    facts = JobsFacts(
        jobs=sorted(found, key=lambda job: (job.name not in wrong, job.name)),
        holders=holders_of(found, await request.admin.locks(), overview.instances),
        findings=findings,
        read_date=overview.read_date,
    )
    return View(
        template="jobs.html", title="Jobs", facts=facts,
        shown={"links": links_of(facts.findings, request), "wrong": wrong},
    )  # fmt: skip


def _type_of(job: JobRow) -> str | None:
    """Return the error without its message, which may quote a payload. Interruptions have a text of outboxio."""
    return job.error if job.error is None or job.result == "INTERRUPTED" else job.error.partition(":")[0]


# --- parked ordering keys -------------------------------------------------------------------------


MOST = 200


class KeysFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    keys: list[KeyStatus]
    """Longest parked first."""
    is_all: bool
    """False if there are more keys, or may be."""


async def keys(request: PageRequest) -> View:
    """Show the parked keys of all handlers, or of one handler."""
    refuse_unknown_parameters(request.query, ["handler", *COMMON_PARAMETERS])
    name = request.query.get("handler")
    found = list(await request.admin.keys(name, limit=MOST + 1, shard=request.shard))
    field: dict[str, Any] = {
        "name": "handler", "label": "Handler", "value": name, "options": await handler_names(request, name),
    }  # fmt: skip
    facts = KeysFacts(keys=found[:MOST], is_all=len(found) <= MOST)
    return View(template="keys.html", title="Parked keys", facts=facts, shown={"around": [field]})


# --- the glossary ---------------------------------------------------------------------------------


async def glossary(request: PageRequest) -> View:
    """Show the states and terms with their explanations."""
    return View(template="glossary.html", title="Glossary", facts={"states": STATES, "terms": TERMS}, refreshes=False)
