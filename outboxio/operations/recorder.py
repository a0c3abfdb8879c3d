"""The shards of an operation, and the recording of operations.

Each operation is a row of ``operations`` on each shard that it changes. The row is written before the change, and
updated with the result. An operation whose process dies therefore leaves a trace: the process that fans out ends such a
row as FAILED (``takeover.py``).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from uuid import UUID

from msgspec import Struct
from msgspec.structs import asdict, replace

from outboxio.actions.executor import refuse_in_transaction
from outboxio.errors import ConfigurationError, RightsMissing
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.model.redaction import Redact, storable
from outboxio.operations.arguments import text_argument
from outboxio.storage.protocols import Database
from outboxio.support.clock import ShardClock
from outboxio.support.ids import ProcessName, uuid7
from outboxio.support.log import log_of, type_name
from outboxio.support.text import briefly

_TICK = timedelta(microseconds=1)


class AdminShard(Struct, frozen=True):
    """A shard, as operations see it."""

    database: Database
    clock: ShardClock
    wake: Callable[[], None]
    """Wakes the loops, here and in other processes, after notifications became due or ended."""
    decisions_changed: Callable[[], None]
    """Wakes the loops, here and in other processes, after a partition count changed or a run was cancelled."""
    operation_requested: Callable[[UUID], None]
    """Schedules an operation to run in the background, if this process is in ``running()``."""

    async def measure(self) -> None:
        """Read the time from the database, because the clock of an operator's machine may be wrong."""
        await self.clock.measure(self.database.now)

    async def now(self) -> datetime:
        """Return the current time by the database's clock."""
        await self.measure()
        return self.clock()


class BulkCutoffs:
    """The upper bounds of bulk operations, which match notifications that changed before them; increasing per shard.

    They increase even if the clock of a test does not, so that rows changed by one operation match the next one.
    """

    def __init__(self) -> None:
        self._latest: dict[str, datetime] = {}

    def next(self, shard: str, now: datetime) -> datetime:
        """Return a time after ``now``, so that notifications that changed exactly at ``now`` match."""
        latest = max(now, self._latest.get(shard, now)) + _TICK
        self._latest[shard] = latest
        return latest


class AdminShards:
    """All shards of an outbox."""

    def __init__(self, shards: Mapping[str, AdminShard], owner: object) -> None:
        """``owner``: the outbox, whose transactions would block an operation on a database with a single writer."""
        self._shards = shards
        self._owner = owner

    def chosen(self, shard: str | None) -> Sequence[AdminShard]:
        """Return the shard with this name, or all shards. Raises :class:`ConfigurationError` for an unknown name."""
        if shard is None:
            return tuple(self._shards.values())
        found = self._shards.get(shard) if isinstance(shard, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        if found is None:
            shards = ", ".join(map(repr, self._shards))
            raise ConfigurationError(f"there is no shard {briefly(shard)}; the shards are {shards}")
        return [found]

    def databases(self, shard: str | None) -> Sequence[Database]:
        return [reached.database for reached in self.chosen(shard)]

    def to_write(self, call: str, shard: str | None) -> Sequence[AdminShard]:
        """Like :meth:`chosen`. Raises :class:`SelfDeadlock` in a transaction on a database with a single writer."""
        chosen = self.chosen(shard)
        fix = "this database has a single writer; call it after the transaction has ended"
        names = [reached.database.name for reached in chosen if reached.database.has_one_writer]
        refuse_in_transaction(self._owner, call, fix, names)
        return chosen


# --- errors about missing privileges --------------------------------------------------------------


@asynccontextmanager
async def naming_rights(database: Database, kind: str) -> AsyncGenerator[None]:
    """Raise :class:`RightsMissing` if the body fails because the database user lacks a privilege.

    ``kind``: the kind of the operation. Privileges are not checked in advance, because that takes further queries.
    """
    try:
        yield
    except Exception as error:
        if not database.lacks_rights(error):
            raise
        lacking = await database.schema.missing_rights()
        raise lacking.get(kind) or RightsMissing.from_error(database.name, error) from error


# --- recording ------------------------------------------------------------------------------------

logger = log_of(__name__)

LONGEST_TEXT = 1000  # characters of the columns reason and error

#: The ends of an operation, the worst first. An operation on several shards has the worst state.
_WORST_FIRST = (OperationState.FAILED, OperationState.RUNNING, OperationState.STOPPED, OperationState.DONE)


class By(Struct, frozen=True):
    """The default actor and origin of operations."""

    actor: str = "code"
    origin: str = "code"


class OperationRequest(Struct, frozen=True, kw_only=True):
    """The validated request for an operation, before it is recorded on a shard."""

    id: UUID
    kind: str
    request: dict[str, object]
    actor: str
    origin: str
    reason: str | None

    @property
    def call(self) -> str:
        """The method call, for error messages."""
        return f"admin.{self.kind}()"

    def operation(self, now: datetime, shard: str) -> Operation:
        """Return the new operation on a shard."""
        return Operation(**asdict(self), created_date=now, updated_date=now, shard=shard)


class ChangeCounts(Struct, frozen=True):
    """The numbers of notifications that an operation matched and changed."""

    matched: int
    done: int


Change = Callable[[AdminShard], Awaitable[int | ChangeCounts]]


class Recorder:
    """Runs operations and records them."""

    def __init__(
        self,
        namespace: str,
        shards: AdminShards,
        process: ProcessName,
        by: By,
        redact: Redact,
        operation_ended: Callable[[], None],
    ) -> None:
        """``process``: the name of this process in ``operations``. ``operation_ended`` is called after each one."""
        self._order_ended = operation_ended
        self._process = process
        self.by = by
        self._namespace = namespace
        self._shards = shards
        self._redact = redact

    @property
    def worker(self) -> str:
        """The name of this process in ``operations``."""
        return self._process.text

    def request(self, kind: str, request: Mapping[str, object], actor: object, reason: object) -> OperationRequest:
        """Return a validated request. Raises :class:`ConfigurationError` for a text that cannot be stored."""
        return OperationRequest(
            id=uuid7(),
            kind=kind,
            request={name: value for name, value in request.items() if value is not None},
            actor=self.by.actor if actor is None else text_argument(actor, "actor"),
            origin=self.by.origin,
            reason=None if reason is None else _reason_argument(reason),
        )

    async def carry_out(self, requested: OperationRequest, shard: str | None, change: Change) -> list[Operation]:
        """Make a change on each chosen shard, record it, and wake the loops of shards with changed rows."""
        return [await self._on(requested, one, change) for one in self._shards.to_write(requested.call, shard)]

    async def done(self, requested: OperationRequest, shard: str | None, change: Change) -> int:
        """Like :meth:`carry_out`, but return the number of changed rows on all shards."""
        return sum(operation.done for operation in await self.carry_out(requested, shard, change))

    async def begin(self, requested: OperationRequest, one: AdminShard, worker: str) -> Operation:
        """Record the start of an operation on a shard."""
        now = await one.now()
        for name, text in {"actor": requested.actor, "reason": requested.reason or ""}.items():
            if (refused := one.database.encoding.why_refused(text)) is not None:
                raise ConfigurationError(f"{name} {refused}: {briefly(text)}")
        operation = requested.operation(now, one.database.name)
        async with naming_rights(one.database, requested.kind):
            await one.database.operations.insert(self._namespace, operation, worker)
        return operation

    async def end(self, one: AdminShard, operation: Operation, worker: str) -> Operation:
        """Record and log the result of an operation. Returns the finished operation."""
        now = one.clock()
        error = operation.error and one.database.encoding.escaped(operation.error)
        ended = replace(operation, error=error, updated_date=now, finished_date=now)
        self._order_ended()
        if await one.database.operations.finish(self._namespace, ended, worker):
            log_end(ended)
        return ended

    async def _on(self, requested: OperationRequest, one: AdminShard, change: Change) -> Operation:
        operation = await self.begin(requested, one, self.worker)
        try:
            async with naming_rights(one.database, requested.kind):
                found = await change(one)
        except Exception as error:
            try:
                await self.end(one, after_error(operation, error, self._redact), self.worker)
            except Exception as lost:  # the first error matters
                logger.warning(
                    "cannot record the result of operation %s: %s",
                    operation.id,
                    lost,
                    operation=str(operation.id),
                )
            raise
        counts = found if isinstance(found, ChangeCounts) else ChangeCounts(found, found)
        if counts.done:
            one.wake()
        refused = counts.matched - counts.done
        ended = replace(operation, state=OperationState.DONE, matched=counts.matched, done=counts.done, refused=refused)
        return await self.end(one, ended, self.worker)


def after_error(operation: Operation, error: Exception, redact: Redact) -> Operation:
    """Return the operation as FAILED with a description of the error."""
    description = storable(redact(f"{type_name(error)}: {error}"), LONGEST_TEXT)
    return replace(operation, state=OperationState.FAILED, error=description)


def log_end(operation: Operation) -> None:
    """Log the result of an operation."""
    logger.info(
        "%s by %s is %s: %d of %d notifications changed", operation.kind, operation.actor, operation.state,
        operation.done, operation.matched, operation=str(operation.id), actor=operation.actor, origin=operation.origin,
        reason=operation.reason, shard=operation.shard,
    )  # fmt: skip


def added_up(operations: Sequence[Operation]) -> Operation:
    """Combine the operations of several shards: the sums of the counts, the worst state, the first error."""
    first, *others = operations
    if not others:
        return first
    ends = [one.finished_date for one in operations if one.finished_date is not None]
    return replace(
        first,
        state=next(state for state in _WORST_FIRST if any(one.state is state for one in operations)),
        matched=sum(one.matched for one in operations),
        done=sum(one.done for one in operations),
        refused=sum(one.refused for one in operations),
        created_date=min(one.created_date for one in operations),
        updated_date=max(one.updated_date for one in operations),
        finished_date=max(ends) if len(ends) == len(operations) else None,
        error=next((one.error for one in operations if one.error is not None), None),
        shard=", ".join(one.shard for one in operations),
        is_complete=all(one.is_complete for one in operations),
    )


def _reason_argument(reason: object) -> str:
    if not isinstance(reason, str) or len(reason) > LONGEST_TEXT:
        raise ConfigurationError(f"reason is {briefly(reason)}; expected a text of at most {LONGEST_TEXT} characters")
    for start in range(0, len(reason), 255):
        text_argument(reason[start : start + 255], "reason")
    return reason
