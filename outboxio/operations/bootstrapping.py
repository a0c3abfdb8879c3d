"""Bootstrap: a handler gets an event for each existing row, in chunks that lock their rows (decision 85).

A chunk is a transaction that reads rows in share mode, and writes their events, the notifications of the handler, and
the position. A writer of such a row has either committed before, and the chunk reads its change; or it waits, and its
event gets a higher sequence. Admission (``runs/ordering.py``) runs older events that wait for fan-out first.
"""

# pyright: reportPrivateUsage=false
# A chunk writes on the session of its transaction.

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, cast
from uuid import NAMESPACE_OID, UUID, uuid5

from msgspec import Struct
from msgspec.structs import replace

from outboxio.actions.executor import ActionExecutor, current_cause
from outboxio.errors import CommitUnknown, ConfigurationError, DatabaseUnavailable, UnknownHandler
from outboxio.fanout.fanout import Announcer
from outboxio.handlers.handler import Handler, subscriptions_of
from outboxio.model.event import BOOTSTRAP_ACTION, EventRecord
from outboxio.model.lock_name import LockName
from outboxio.model.operating.groups import PageCursor
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.model.snapshot import Snapshot, SnapshotRows, ToEvent
from outboxio.operations.arguments import handler_argument
from outboxio.operations.base import AdminBase
from outboxio.operations.recorder import By, after_error, log_end, naming_rights
from outboxio.operations.takeover import SILENCE
from outboxio.support.aio import run_to_completion
from outboxio.support.duration import pause_after
from outboxio.support.ids import uuid7
from outboxio.support.log import log_of
from outboxio.support.text import briefly
from outboxio.transaction import Transaction

logger = log_of(__name__)

KIND = "bootstrap"
MAX_BACKLOG = 5000  # unfinished notifications of the handler, at which no further chunk starts
LARGEST_CHUNK = 10_000  # rows
CHECK_DELAY = 0.2  # seconds between two checks of the backlog, or of a bootstrap of another process
LONG_WAIT = 150  # consecutive checks of the backlog, after which the wait is logged
_MAX_FAILURES = 10  # of a chunk in a row, with transient errors
_BEFORE = timedelta(hours=1)
"""How far a new ``since="now"`` is set back, because open transactions may have events with earlier dates."""

# --- positions -----------------------------------------------------------------------------------
#
# The values of a key are stored as texts that restore the same values: JSON would change dates, decimals and large
# numbers.

_KINDS: Mapping[str, tuple[type, Any, Any]] = {
    "int": (int, str, int),
    "str": (str, str, str),
    "uuid": (UUID, str, UUID),
    "decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "float": (float, repr, float),
}


def as_cursor(key: Sequence[Any]) -> PageCursor:
    """Return a key as a position. Raises :class:`ConfigurationError` for a value that a position cannot hold."""
    texts = list[str]()
    for value in key:
        kind = next((kind for kind, (cls, *_) in _KINDS.items() if isinstance(value, cls)), None)
        if kind is None or isinstance(value, bool):
            raise ConfigurationError(
                f"rows returned the key {briefly(value)}; a key column holds {', '.join(_KINDS)}, and is not NULL"
            )
        texts += [kind, _KINDS[kind][1](value)]
    return PageCursor(KIND, "", tuple(texts))


def key_at(cursor: PageCursor) -> tuple[Any, ...]:
    """Return the key at a position."""
    return tuple(_KINDS[kind][2](text) for kind, text in zip(cursor.key[::2], cursor.key[1::2], strict=True))


# --- the call ------------------------------------------------------------------------------------


class Call(Struct, frozen=True):
    """The checked arguments of a bootstrap."""

    handler: str
    rows: SnapshotRows
    to_event: ToEvent
    key: tuple[str, ...]
    is_single: bool
    """True if the key is the name of a single column, and ``after`` is its value."""
    chunk: int
    again: bool

    @property
    def request(self) -> dict[str, object]:
        """The arguments to record with the operation."""
        return {"handler": self.handler, "key": list(self.key), "chunk": self.chunk}

    def keys_of(self, found: Any, after: tuple[Any, ...] | None) -> list[tuple[Any, ...]]:
        """Return the keys of the rows of a chunk. Raises :class:`ConfigurationError` for rows that are not valid."""
        if not issubclass(type(found), Sequence):
            raise ConfigurationError(f"rows returned {briefly(found)}; expected a list of rows, as `tx.fetch` returns")
        if len(found) > self.chunk:
            raise ConfigurationError(f"rows returned {len(found):,} rows instead of {self.chunk:,}: add a LIMIT")
        keys, seen = list[tuple[Any, ...]](), {after}
        for row in found:
            try:
                key = tuple(row[column] for column in self.key)
            except (KeyError, IndexError, TypeError) as error:
                raise ConfigurationError(
                    f"rows returned {briefly(row)}, which lacks a column of the key ({', '.join(self.key)}): {error!r}"
                ) from error
            as_cursor(key)
            if key in seen or (after is not None and not _may_follow(key, after)):
                raise ConfigurationError(
                    f"rows returned the key {briefly(key)} after {briefly(after)}: select the rows with a key greater "
                    f"than `after`, and order them by {', '.join(self.key)}, which must be unique"
                )
            keys.append(key)
            seen.add(key)
            after = key
        return keys


def _may_follow(key: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return False if a key certainly does not follow another. Collations differ in the order of texts."""
    try:
        return any(isinstance(value, str) for value in key) or key > before
    except TypeError as error:  # such as a naive datetime after an aware one
        raise ConfigurationError(f"rows returned the keys {briefly(before)} and {briefly(key)}: {error}") from error


def checked_call(handler: object, rows: Any, to_event: Any, key: Any, chunk: Any, again: object) -> Call:
    """Validate the arguments. Raises :class:`ConfigurationError`."""
    names: Any = [key] if isinstance(key, str) else key
    listed: list[Any] = list(cast("Sequence[Any]", names)) if isinstance(names, list | tuple) else []
    if not listed or not all(isinstance(column, str) and column for column in listed):
        raise ConfigurationError(f"key is {briefly(key)}; expected the name of a unique column, or a list of names")
    if not isinstance(chunk, int) or isinstance(chunk, bool) or not 1 <= chunk <= LARGEST_CHUNK:
        raise ConfigurationError(f"chunk is {briefly(chunk)}; expected a number of rows from 1 to {LARGEST_CHUNK:,}")
    for name, function, expected in (
        ("rows", rows, "an async function of (tx, after, limit)"),
        ("to_event", to_event, "a plain function of a row"),
    ):
        if not callable(function) or (name == "to_event" and inspect.iscoroutinefunction(function)):
            raise ConfigurationError(f"{name} is {briefly(function)}; expected {expected}")
    return Call(handler_argument(handler), rows, to_event, tuple(listed), isinstance(key, str), chunk, again is True)


# --- the run -------------------------------------------------------------------------------------


class Bootstrap(AdminBase):
    """A call of ``outbox.bootstrap``."""

    def __init__(self, admin: AdminBase, executor: ActionExecutor, call: Call, shard: str | None) -> None:
        super().__init__(admin._setup, By())
        self._executor = executor
        self._target = executor.shard(shard)
        self._one = next(iter(self._shards.chosen(self._target.database.name)))
        self._table = self._one.database.bootstraps
        self._call = call
        found = self._handlers.find(call.handler)
        if found is None:
            raise UnknownHandler(call.handler, self._namespace, self._handlers.names)
        self._handler: Handler = found
        self._event_types = {subscription.event_type for subscription in subscriptions_of(found)}
        self._id = self._id_of(found.name)
        self._worker = f"{self._recorder.worker}:{uuid7().hex[-8:]}"
        self._again = call.again
        self._after: tuple[Any, ...] | None = None
        owner = self._setup.process.text
        self._announcer = Announcer(
            self._namespace, self._one.database, self._handlers, self._one.clock, self._settings.subscription_ttl, owner
        )

    async def run(self) -> Operation:
        """Run the bootstrap, or wait for the process that runs it. Returns the finished operation."""
        async with naming_rights(self._one.database, KIND):
            await self._one.measure()
            await self._find_under_alias()
            await self._subscribe()
            failures = 0
            while True:
                before = self._after
                try:
                    if not await self._take():
                        return await self._operation()
                    state = await self._run_chunks()
                    if state is not None and await self._end(state):
                        return await self._operation()
                except BaseException as error:
                    failures = failures + 1 if self._after == before else 1
                    if failures > _MAX_FAILURES or not self._is_transient(error):
                        await run_to_completion(self._interrupted(error))
                        raise
                    await asyncio.sleep(pause_after(failures))

    def _id_of(self, name: str) -> UUID:
        """Return the id of the handler's only bootstrap on a shard. Concurrent calls conflict on its primary key."""
        return uuid5(NAMESPACE_OID, "/".join((self._namespace, KIND, name)))

    async def _find_under_alias(self) -> None:
        """Use the bootstrap of a former name if the handler was renamed."""
        for id in map(self._id_of, (self._handler.name, *sorted(self._handler.aliases))):
            if await self._one.database.operations.get(self._namespace, id) is not None:
                self._id = id
                return

    def _is_transient(self, error: BaseException) -> bool:
        """Return True for a lost connection, too: the position shows whether the last chunk was committed."""
        database = self._one.database
        return isinstance(error, CommitUnknown | DatabaseUnavailable) or (
            isinstance(error, Exception) and (database.is_transient(error) or database.is_unreachable(error))
        )

    async def _subscribe(self) -> None:
        """Announce the handler before the first row is read, so that it gets all later changes."""
        since, database, now = self._handler.options.since, self._one.database, self._one.clock()
        if isinstance(since, datetime) and since > now:
            raise ConfigurationError(
                f"handler {self._handler.name!r} has since={since!r}, which is in the future: the handler would miss "
                "all changes until then. Remove since="
            )
        if since == "now":
            announced = await database.subscriptions.announced(self._namespace)
            if self._handler.names.isdisjoint(one.handler_name for one in announced):
                mark = LockName(self._namespace, "since", self._handler.name)
                await database.subscriptions.set_start_dates({mark: now - _BEFORE}, self._setup.process.text)
        await self._announcer.announce_if_due()

    # --- the worker ------------------------------------------------------------------------------

    async def _take(self) -> bool:
        """Become the worker of the bootstrap; False if it is done. Waits while another process runs it."""
        operations, table, namespace = self._one.database.operations, self._table, self._namespace
        has_waited = False
        while True:
            found, now = await operations.get(namespace, self._id), self._one.clock()
            if found is None:
                requested = replace(self._recorder.request(KIND, self._call.request, None, None), id=self._id)
                await table.begin(namespace, requested.operation(now, self._one.database.name), self._worker)
            elif found.has_ended:
                if found.state is OperationState.DONE and (has_waited or not self._again):
                    return False
                if has_waited and await operations.stop_requested(namespace, self._id):
                    return False  # an operator has stopped it
                if not self._again:
                    self._refuse_other_key(found)
                await table.reopen(
                    namespace, found, self._worker, now, request=self._call.request if self._again else None
                )
            else:
                self._refuse_other_key(found)
                if await operations.take(namespace, self._id, self._worker, now - SILENCE, now) is not None:
                    if await operations.stop_requested(namespace, self._id):  # before its process died
                        await self._end(OperationState.STOPPED)
                    elif self._again:
                        await table.reopen(namespace, found, self._worker, now, request=self._call.request)
            if await table.touch(namespace, self._id, self._worker, now):
                cursor = await table.reached(namespace, self._id)
                self._after, self._again = None if cursor is None else key_at(cursor), False
                return True
            has_waited |= found is not None and not found.has_ended
            await asyncio.sleep(CHECK_DELAY)

    def _refuse_other_key(self, found: Operation) -> None:
        former, key = found.request.get("key"), list(self._call.key)
        if former != key:
            raise ConfigurationError(
                f"the bootstrap of {self._handler.name!r} was started with key={former!r}, and key is now {key!r}: its "
                "position does not apply. Continue with the former key, or stop it and call with again=True"
            )

    async def _interrupted(self, error: BaseException) -> None:
        """Record an interruption. The next call continues at the position."""
        try:
            if isinstance(error, Exception):
                failed = after_error(await self._operation(), error, self._redact)
                await self._end(OperationState.FAILED, failed.error)
            else:
                await self._end(OperationState.STOPPED)
        except Exception as lost:  # the error or the cancellation that ended the call matters
            logger.warning("cannot record the result of operation %s: %s", self._id, lost, operation=str(self._id))

    async def _end(self, state: OperationState, error: str | None = None) -> bool:
        error = error and self._one.database.encoding.escaped(error)
        if not await self._table.end(self._namespace, self._id, self._worker, state, error, self._one.clock()):
            return False
        log_end(await self._operation())
        return True

    async def _operation(self) -> Operation:
        found = await self._one.database.operations.get(self._namespace, self._id)
        assert found is not None  # a row of this kind is never removed
        return found

    # --- the chunks ------------------------------------------------------------------------------

    async def _run_chunks(self) -> OperationState | None:
        """Process all chunks, and return the final state; ``None`` if another process has taken over."""
        names, checks = sorted(self._handler.names), 0
        while True:
            await self._announcer.announce_if_due()
            is_behind = await self._table.backlog(self._namespace, names, MAX_BACKLOG) >= MAX_BACKLOG
            if is_behind and await self._table.touch(self._namespace, self._id, self._worker, self._one.clock()):
                checks += 1
                if checks == LONG_WAIT:
                    logger.warning(
                        "bootstrap of handler %r is waiting: the handler has %d or more unfinished notifications; "
                        "check whether it is paused, failing, or not running in any process",
                        self._handler.name, MAX_BACKLOG, handler=self._handler.name, operation=str(self._id),
                    )  # fmt: skip
                await asyncio.sleep(CHECK_DELAY)
                continue
            checks = 0
            keys = await self._chunk()
            if keys is None:
                stop_requested = await self._one.database.operations.stop_requested(self._namespace, self._id)
                return OperationState.STOPPED if stop_requested else None
            if not keys:
                return OperationState.DONE
            self._after = keys[-1]
            self._one.wake()

    async def _chunk(self) -> list[tuple[Any, ...]] | None:
        """Process a chunk, as an action that is retried like any other, and return the keys of its rows."""
        executor, shard, action_id = self._executor, self._target.database.name, uuid7()
        retries, params = executor.retries((), shard), {"operation": str(self._id)}
        with executor.executing(BOOTSTRAP_ACTION, shard, None) as execution:
            while True:
                try:
                    async with executor.attempt(
                        BOOTSTRAP_ACTION, params, shard=shard, correlation_id=None, headers=None, action_id=action_id
                    ) as tx:
                        keys = await self._emit(tx, params)
                    return keys
                except Exception as error:
                    delay = executor.delay_before_retry(retries, error, BOOTSTRAP_ACTION, action_id, shard)
                    if delay is None:
                        raise
                await asyncio.sleep(delay)
                execution.repeated()

    async def _emit(self, tx: Transaction, params: Mapping[str, str]) -> list[tuple[Any, ...]] | None:
        """Read the rows, and write their events for the handler and the position. ``None`` if the operation was lost.

        The row of the operation is locked first, so that a process that takes over waits for the chunk.
        """
        call, target, session, now = self._call, self._target, tx._session, self._one.clock()
        tx.was_joined = True  # the chunk writes its rows itself
        if not await self._table.lock(session, self._namespace, self._id, self._worker, now):
            return None
        after = self._after[0] if call.is_single and self._after is not None else self._after
        reading: Any = call.rows(tx, after, call.chunk)
        if not inspect.isawaitable(reading):
            raise ConfigurationError(f"rows returned {briefly(reading)}; write `async def rows(tx, after, limit)`")
        found: Any = await reading
        keys = call.keys_of(found, self._after)
        if not keys:
            return keys
        records = [
            record for row, key in zip(found, keys, strict=True) if (record := self._record_of(row, key)) is not None
        ]
        if records:
            action = self._executor.action_record(
                target, BOOTSTRAP_ACTION, params, None, tx.action_id, None, current_cause()
            )
            await tx.write(action.completed(target.clock()), records)
        scope = self._namespace, self._id, self._handler.name
        ids = [record.id for record in records]
        if not await self._table.write(session, scope, ids, as_cursor(keys[-1]), len(keys), self._one.clock()):
            raise ConfigurationError(
                f"handler {self._handler.name!r} has lost its subscriptions during the bootstrap: an operator has "
                "unsubscribed it. Call outbox.bootstrap again to continue"
            )
        return keys

    def _record_of(self, row: Any, key: tuple[Any, ...]) -> EventRecord | None:
        made: Any = self._call.to_event(row)
        if made is None:
            return None
        snapshot = made if isinstance(made, Snapshot) else Snapshot(made)
        model_id = key[0] if snapshot.model_id is None and self._call.is_single else snapshot.model_id
        record = self._target.emitter.record(
            snapshot.event, current_cause(), model_id=model_id, model_type=snapshot.model_type,
            ordering_key=snapshot.ordering_key, topic=self._handler.topic,
        )  # fmt: skip
        name = self._handler.name
        if self._handler.topic is None and record.event_type not in self._event_types:
            raise ConfigurationError(
                f"to_event returned an event {record.event_type!r}, which handler {name!r} does not handle; it handles "
                f"{', '.join(sorted(self._event_types))}"
            )
        if self._handler.options.ordered and record.ordering_key is None and record.model_id is None:
            raise ConfigurationError(
                f"to_event returned an event without a key, and handler {name!r} is ordered: return "
                "Snapshot(event, model_id=...) with the model_id or the ordering_key of the row's other events"
            )
        return record
