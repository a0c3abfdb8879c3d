"""Notices about findings: one when a finding appears, and one when it has ended (decision 78).

A receiver is a function registered with ``outbox.on_finding``, or the webhook of ``outboxio watch``. A keyed lock for
each receiver ensures that only one process in the cluster notifies it. A row stores the findings that were sent, so
that the next holder of the lock does not repeat them. Without tables, or while the database is unreachable, the last
process that notified the receiver continues from memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.errors import DatabaseUnavailable
from outboxio.health.overview import OverviewReader
from outboxio.health.rules import RULES
from outboxio.health.values import Finding, Overview
from outboxio.loops.loop import NOTHING, Loop, PollSchedule, RoundResult
from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import Database, InstanceReport, KeySession
from outboxio.storage.unavailable import as_unavailable
from outboxio.support.aio import run_to_completion
from outboxio.support.log import log_of, log_text, type_name
from outboxio.support.text import without_passwords
from outboxio.version import __version__

logger = log_of(__name__)

EVERY = 15.0  # seconds between two evaluations
LONGEST_CALL = 30.0  # seconds for the delivery of a notice
_FOUND_TWICE = ("no_instance", "lock_without_holder")  # reported when found twice: a process may be restarting
_ONLY_IN_MEMORY = ("shard_unreachable",)  # sent while the database is unreachable, so not in the stored row
_NO_NAMESPACE = ""  # a namespace is never empty, so these rows of instance_reports belong to no process

Key = tuple[str, str | None, str | None, str | None]
Deliver = Callable[[Finding], Awaitable[None]]


class Notice(Struct, kw_only=True):
    """A finding that has not ended, or whose end has not been reported yet."""

    finding: Finding
    """The finding as it was when the receiver was notified; its numbers may have changed since."""
    is_sent: bool = False
    rounds: int = 0
    """The number of consecutive evaluations with the finding before the receiver was notified."""
    missing: datetime | None = None
    """The time since which the finding is absent."""
    has_failed: bool = False
    """True if the last call of the receiver failed."""

    @property
    def content(self) -> Finding:
        """The finding that is passed to the receiver."""
        return replace(self.finding, ended=self.missing) if self.is_sent else self.finding


class Notices:
    """Decides which findings to send. A finding is identified by its rule, handler, job and shard."""

    def __init__(self) -> None:
        self._open: dict[Key, Notice] = {}

    def update(self, overview: Overview) -> list[Notice]:
        """Return the due notices: new findings, and findings that are absent for the second time in a row."""
        found: dict[Key, Finding] = {}
        for finding in overview.findings:
            found.setdefault(_key(finding), finding)
        due: list[Notice] = []
        for key, finding in found.items():
            notice = self._open.setdefault(key, Notice(finding=finding))
            notice.missing = None
            if not notice.is_sent:
                since = notice.finding.since or finding.since or overview.read_date
                notice.finding, notice.rounds = replace(finding, since=since), notice.rounds + 1
                if notice.rounds >= (2 if finding.rule in _FOUND_TWICE else 1):
                    due.append(notice)
        for key, notice in list(self._open.items()):
            if key in found or _is_unknown(notice.finding, overview):
                continue
            if not notice.is_sent:
                del self._open[key]
            elif notice.missing is None:
                notice.missing = overview.read_date
            else:
                due.append(notice)
        return due

    def sent(self, notice: Notice) -> None:
        """Record that the receiver has received the notice."""
        if notice.is_sent:
            del self._open[_key(notice.finding)]
        notice.is_sent, notice.has_failed = True, False

    @property
    def any_failed(self) -> bool:
        """True if a notice could not be delivered and will be retried."""
        return any(notice.has_failed for notice in self._open.values())

    @property
    def all(self) -> list[Notice]:
        """The notices to store for the next holder of the lock."""
        return list(self._open.values())

    def add(self, stored: list[Notice]) -> None:
        """Take over the notices that the previous holder of the lock stored."""
        self._open = {
            key: notice
            for key, notice in self._open.items()
            if not notice.is_sent or notice.finding.rule in _ONLY_IN_MEMORY
        } | {_key(notice.finding): notice for notice in stored}


def _key(finding: Finding) -> Key:
    return finding.rule, finding.handler, finding.job, finding.shard


def _is_unknown(finding: Finding, overview: Overview) -> bool:
    """Return True if an absent finding may persist: its shard could not be read, or a worse finding hides it."""
    if finding.rule == "shard_unreachable":
        return False
    if any(one.shard == finding.shard and (one.error or one.schema) for one in overview.shards):
        return finding.rule != "schema_behind" or any(
            one.error for one in overview.shards if one.shard == finding.shard
        )
    hidden = {rule.name for rule in RULES if any(one.rule in rule.unless for one in overview.findings)}
    return finding.rule in hidden


class Watched(Struct, frozen=True):
    """The outbox whose findings are reported."""

    namespace: str
    owner: str
    """The name of this process."""
    database: Database
    """The database of the first shard, which has the locks and the sent findings."""
    overviews: OverviewReader


class FindingWatch:
    """Notifies a receiver while this process is responsible for it."""

    def __init__(
        self, watched: Watched, receiver: str, deliver: Deliver, *, every: float = EVERY, starts: bool = False,
        longest: float | None = None,
    ) -> None:  # fmt: skip
        """``every``: the seconds between two evaluations. ``starts``: begin even if the database cannot be reached.
        ``longest``: the maximum time to deliver a notice in seconds, 30 by default."""
        self._watched, self._database = watched, watched.database
        self._receiver = receiver
        self._deliver = deliver
        self._every, self._longest = every, longest or LONGEST_CALL
        self._lock = LockName(watched.namespace, "lock", f"findings {receiver}")
        self._session: KeySession | None = None
        self._holds = False
        self._leads = starts
        """True if this process was the last one known to notify the receiver."""
        self._notices = Notices()
        self._written: bytes | None = None
        self._is_in_memory = False

    @property
    def leads(self) -> bool:
        """True if this process is the one that notifies the receiver."""
        return self._leads

    @property
    def has_failed(self) -> bool:
        """True if a notice could not be delivered."""
        return self._notices.any_failed

    async def run(self) -> None:
        """Evaluate the findings repeatedly until the task is cancelled."""
        loop = Loop(f"findings for {self._receiver}", self.run_once, PollSchedule(lambda: self._every))
        try:
            await loop.run()
        finally:
            await run_to_completion(self.close())

    async def run_once(self) -> RoundResult:
        """Evaluate the findings once and notify the receiver. Does nothing if another process has the lock."""
        await self._check_lock()
        if not self._leads:
            return NOTHING
        _, overview = await self._watched.overviews.read()
        due = self._notices.update(overview)
        try:
            await asyncio.gather(*map(self._send, due))
        finally:
            await run_to_completion(self._store())
        return RoundResult(len(due))

    async def close(self) -> None:
        """Let another process notify the receiver."""
        self._holds = self._leads = False
        if (session := self._session) is not None:
            await session.close()

    async def _send(self, notice: Notice) -> None:
        problem: BaseException
        try:
            async with asyncio.timeout(self._longest):
                await self._deliver(notice.content)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            problem = error  # raised by the function itself
        except Exception as error:
            problem = error
        else:
            return self._notices.sent(notice)
        if not notice.has_failed:
            logger.warning(
                "could not report finding %s to %s; retrying in %.0f s: %s", notice.finding.rule,
                self._receiver, self._every, without_passwords(log_text(problem)), error_type=type_name(problem),
            )  # fmt: skip
        notice.has_failed = True

    # --- the lock, and what was sent ---------------------------------------------------------------

    async def _check_lock(self) -> None:
        """Acquire the lock if it is free. While the database cannot be reached, nothing changes."""
        try:
            with as_unavailable(self._database):
                await self._hold()
        except DatabaseUnavailable as error:
            self._holds = False
            logger.debug("could not check the lock for notices to %s: %s", self._receiver, error)

    async def _hold(self) -> None:
        session = self._session
        if session is None or not session.is_open:
            if session is not None:
                await session.close()
            self._holds = False
            session = self._session = self._database.key_session(self._watched.owner, 2 * self._every)
            await self._database.refuse_shared_sessions()
            await session.open()
        if self._holds:
            return await session.prove()
        self._leads = await session.take(self._lock, 0)
        if self._leads:
            await self._load()
        self._holds = self._leads

    async def _load(self) -> None:
        """Load the findings that the previous holder of the lock has sent."""
        try:
            reports = await self._database.reports.reports(_NO_NAMESPACE, datetime(1970, 1, 1))
            rows = [
                msgspec.json.decode(one.report, type=_Stored) for one in reports if one.instance == self._lock.lease
            ]
        except Exception as error:
            return self._not_stored(error)
        self._notices.add([notice for row in rows for notice in row.notices])
        self._written = msgspec.json.encode(_Stored(self._notices.all)) if rows else None

    async def _store(self) -> None:
        """Store the sent findings if they have changed. The row exists only while there are any."""
        stored = _Stored(self._notices.all)
        content = msgspec.json.encode(stored) if stored.notices else None
        if not self._holds or content == self._written:
            return
        reports, instance = self._database.reports, self._lock.lease
        try:
            if content is None:
                await reports.remove_report(_NO_NAMESPACE, instance)
            else:
                now = await self._database.now()
                await reports.write_report(_NO_NAMESPACE, InstanceReport(
                    instance=instance, version=__version__, started_date=now, last_seen_date=now,
                    delay_seconds=round(self._every), report=msgspec.Raw(content),
                ))  # fmt: skip
        except Exception as error:
            return self._not_stored(error)
        self._written, self._is_in_memory = content, False

    def _not_stored(self, error: Exception) -> None:
        level, self._is_in_memory = logging.DEBUG if self._is_in_memory else logging.WARNING, True
        logger.log(
            level, "could not store the findings reported to %s; keeping them in memory: %s", self._receiver,
            without_passwords(log_text(error)), error_type=type_name(error),
        )  # fmt: skip


class _Stored(Struct):
    notices: list[Notice]
