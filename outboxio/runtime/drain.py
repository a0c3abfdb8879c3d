"""Draining: work until no notification is due, here or in the process that holds the locks.

A drain does rounds of fan-out and dispatch until a pass finds no rows. Inside ``running()`` the loops keep running.
Otherwise the drain starts its own shard run. Because a handler may take long, four loops of that run work alongside the
rounds: they prove the locks, announce the handlers, write outcomes (decision 8) and write the runs of each minute.
"""

from __future__ import annotations

import asyncio
from copy import copy

from outboxio.errors import DrainTimeout
from outboxio.loops.blocked_loop import observed
from outboxio.loops.log_limiter import flush_limiters
from outboxio.runtime.environment import Drained, Roles
from outboxio.runtime.lock_manager import standby_pause
from outboxio.runtime.shard import ShardRuntime
from outboxio.runtime.shard_run import ShardRun
from outboxio.statistics.figures import Counters
from outboxio.storage.unavailable import as_unavailable
from outboxio.support.aio import run_to_completion
from outboxio.support.log import shared_fields

_PAUSE_FACTOR = 4  # a drain waits 4 times as long between two queries as a query takes


async def drain_shard(shard: ShardRuntime, deadline: float) -> Drained:
    """Drain a shard.

    Raises :class:`DrainTimeout` after ``deadline`` (event loop time), and
    :class:`DatabaseUnavailable` for temporary errors of the database.
    """
    run, beside_loops = shard.work, shard.work is not None
    if run is None:
        roles = Roles(fanout=True, handling=shard.environment.settings.handling_enabled)
        with as_unavailable(shard.database):
            await shard.prepare(roles)
        run = shard.start_run(roles, drains=True)
    before = _totals(run)
    limit = asyncio.timeout_at(deadline)
    try:
        with shared_fields(**shard.log_fields):
            async with limit:
                with as_unavailable(shard.database):
                    await (_drain_beside_loops(run) if beside_loops else _drain_alone(run))
    except TimeoutError as error:
        if limit.expired():
            raise DrainTimeout(run.name) from error
        raise
    finally:
        if not beside_loops:
            shard.work = None
            await run_to_completion(run.abandon())
        flush_limiters()
    return Drained(*(now - then for now, then in zip(_totals(run), before, strict=True)))


def _totals(run: ShardRun) -> tuple[int, ...]:
    """Return the values of :class:`Drained` for the shard run so far."""
    counters = run.counters
    return run.fanout.events, counters.succeeded, counters.failed, counters.expired, counters.dead


async def _drain_alone(run: ShardRun) -> None:
    run.dispatcher.caller.shard_task = asyncio.current_task()
    await run.announce()
    await run.locks.run_once()
    problem: Exception | None = None
    async with asyncio.TaskGroup() as group:
        helpers = [run.loops.locks, run.loops.announce, run.loops.settle, run.loops.reports]
        for loop in helpers:
            group.create_task(loop.run(), name=f"outboxio {loop.name}")
        try:
            with observed(run.dispatcher.running, run.was_blocked):
                await _drain_all(run)
        except Exception as error:
            problem = error  # raised after the group, so that the caller gets no ExceptionGroup
        finally:
            for loop in helpers:
                loop.stop()
    if problem is not None:
        raise problem


async def _drain_beside_loops(run: ShardRun) -> None:
    try:
        await _drain_all(run)
    except Exception:
        if not run.is_leaving:
            raise
        # The outbox is shutting down and the connections of the loops are closed: end without an error.


async def _drain_all(run: ShardRun) -> None:
    time, has_swept, is_confirmed = asyncio.get_running_loop().time, False, False
    while not run.is_leaving:
        if not run.dispatcher.knows_pauses:
            await run.announce()  # no row starts before the pauses are known
        before = _progress(run)
        if await _drain_pass(run) or run.dispatcher.flush():
            has_swept = is_confirmed = False
            continue
        if not has_swept and _sweep_soon(run):
            has_swept = True  # ends with a sweep, so that no row behind a scan position is missed
            continue
        has_swept = False
        began = time()
        if await _is_due_elsewhere(run):
            is_confirmed = False
            await asyncio.sleep(max(standby_pause() / 4, _PAUSE_FACTOR * (time() - began)))
        elif _progress(run) == before:
            if is_confirmed or not _lacks_fanout(run):
                await run.housekeeping.run_once()
                return
            # The process that fans out may have created rows after this process last read the due rows. So everything
            # is checked once more.
            is_confirmed = True


async def _drain_pass(run: ShardRun) -> bool:
    """Do a round of fan-out and a round of dispatch. True if rows were found, or if there may be more."""
    fanned_out, dispatched = await run.fanout.run_once(), await run.dispatcher.run_once()
    # A row that waits for a full batch does not count as found, but there may be more rows for the batch.
    return fanned_out.more or dispatched.more or fanned_out.found > 0 or dispatched.found > 0


def _sweep_soon(run: ShardRun) -> bool:
    """Make the next rounds read from the beginning of the index. True if a last round did not."""
    owed = [run.fanout.sweep_soon(), run.dispatcher.sweep_soon()]
    return any(owed)


def _progress(run: ShardRun) -> tuple[int, Counters, int]:
    """Return a measure of the work done so far. A new lock counts, because rows may have waited for it."""
    return run.fanout.events, copy(run.counters), run.locks.gains


async def _is_due_elsewhere(run: ShardRun) -> bool:
    """True if rows wait for a lock that this process does not hold, or has to prove again."""
    shard, missing = run.shard, run.locks.not_held
    slots = [name.slot for name in missing if name.role == "dispatch"]
    database, namespace, now = shard.database, shard.environment.namespace, shard.clock()
    if slots and await database.stored_notifications.any_due(namespace, now, slots):
        return True
    if _lacks_fanout(run):
        return await database.events.any_undelivered(namespace, run.announcer.seen_since())
    return False


def _lacks_fanout(run: ShardRun) -> bool:
    """True if another process fans out the events."""
    return any(name.role == "fanout" for name in run.locks.not_held)
