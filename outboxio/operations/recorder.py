"""The shards that an operator's order reaches."""

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
from outboxio.operations.arguments import given_stored
from outboxio.storage.protocols import Database
from outboxio.support.clock import ShardClock
from outboxio.support.ids import ProcessName, uuid7
from outboxio.support.log import log_of, type_name
from outboxio.support.text import briefly

_TICK = timedelta(microseconds=1)


class AdminShard(Struct, frozen=True):
    """A shard, as an operator sees the shard."""

    database: Database
    clock: ShardClock
    wake: Callable[[], None]
    """Tell the loops, here and in other processes, that notifications became due, or ended."""
    decisions_changed: Callable[[], None]
    """Tell the loops, here and in other processes, that a number of partitions has changed, or a run is cancelled."""
    operation_ordered: Callable[[UUID], None]
    """Have this process carry an operation out in the background, if this process is in ``running()``."""

    async def measure(self) -> None:
        """Ask the database for the time, because the clock of an operator's machine may be wrong."""
        await self.clock.measure(self.database.now)

    async def now(self) -> datetime:
        """The present moment by the database's clock."""
        await self.measure()
        return self.clock()


class Ends:
    """The moments before which notifications match a bulk order: each later than all before, on each shard.

    A clock of a test may stand still. Then the notifications of one order still match the next order.
    """

    def __init__(self) -> None:
        self._latest: dict[str, datetime] = {}

    def next(self, shard: str, now: datetime) -> datetime:
        """A moment after ``now``: notifications that have changed at this very moment match."""
        latest = max(now, self._latest.get(shard, now)) + _TICK
        self._latest[shard] = latest
        return latest


class AdminShards:
    """All shards of an outbox."""

    def __init__(self, shards: Mapping[str, AdminShard], owner: object) -> None:
        """``owner``: the outbox, whose transactions would block an order on a database with a single writer."""
        self._shards = shards
        self._owner = owner

    def chosen(self, shard: str | None) -> Sequence[AdminShard]:
        """The shard of this name, or all shards. Raises :class:`ConfigurationError` for an unknown name."""
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
        """The chosen shards. Raises :class:`WaitsForItself` inside a transaction on a database with a single writer."""
        chosen = self.chosen(shard)
        remedy = "this database has one writer; call it when the transaction has ended"
        names = [reached.database.name for reached in chosen if reached.database.has_one_writer]
        refuse_in_transaction(self._owner, call, remedy, names)
        return chosen


# --- the error for an operation for which the user of the database lacks a right ------------------


@asynccontextmanager
async def naming_rights(database: Database, kind: str) -> AsyncGenerator[None]:
    """Raise :class:`RightsMissing` where the body fails because the user may not carry out an operation.

    ``kind``: of the operation. An operation is not checked beforehand, because the check takes further queries.
    """
    try:
        yield
    except Exception as error:
        if not database.lacks_rights(error):
            raise
        lacking = await database.schema.rights_lacking()
        raise lacking.get(kind) or RightsMissing.told_by(database.name, error) from error


# --- the record of orders -------------------------------------------------------------------------
#
# The record of orders: each order of an operator is a row of ``operations``, on each shard that the order reaches.
#
# The row is written before the order, and gets the end of the order afterwards. So an order that dies with its process
# leaves a trace: the process that fans out ends such a row as FAILED (``takeover.py``).


logger = log_of(__name__)

LONGEST_TEXT = 1000  # characters of the columns reason and error

#: The ends of an operation, the worst first. An operation on several shards has the worst state.
_WORST_FIRST = (OperationState.FAILED, OperationState.RUNNING, OperationState.STOPPED, OperationState.DONE)


class By(Struct, frozen=True):
    """Who gives orders, and where, unless an order says otherwise."""

    actor: str = "code"
    origin: str = "code"


class Order(Struct, frozen=True, kw_only=True):
    """An order before any shard is reached."""

    id: UUID
    kind: str
    request: dict[str, object]
    actor: str
    origin: str
    reason: str | None

    @property
    def call(self) -> str:
        """The call in the words of an error."""
        return f"admin.{self.kind}()"

    def operation(self, now: datetime, shard: str) -> Operation:
        """The operation of this order on a shard, at the beginning."""
        return Operation(**asdict(self), created_date=now, updated_date=now, shard=shard)


class Numbers(Struct, frozen=True):
    """How many notifications an order has matched and changed."""

    matched: int
    done: int


Change = Callable[[AdminShard], Awaitable[int | Numbers]]


class Recorder:
    """Carries orders out and records them."""

    def __init__(
        self,
        namespace: str,
        shards: AdminShards,
        process: ProcessName,
        by: By,
        redact: Redact,
        order_ended: Callable[[], None],
    ) -> None:
        """``process``: the name of this process in ``operations``. ``order_ended`` is called after each order."""
        self._order_ended = order_ended
        self._process = process
        self.by = by
        self._namespace = namespace
        self._shards = shards
        self._redact = redact

    @property
    def worker(self) -> str:
        """The name of this process in ``operations``."""
        return self._process.text

    def order(self, kind: str, request: Mapping[str, object], actor: object, reason: object) -> Order:
        """An order with checked texts. Raises :class:`ConfigurationError` for a text that cannot be stored."""
        return Order(
            id=uuid7(),
            kind=kind,
            request={name: value for name, value in request.items() if value is not None},
            actor=self.by.actor if actor is None else given_stored(actor, "actor"),
            origin=self.by.origin,
            reason=None if reason is None else _given_reason(reason),
        )

    async def carry_out(self, order: Order, shard: str | None, change: Change) -> list[Operation]:
        """Make a change on each chosen shard, record the change, and wake the loops of a shard with changed rows."""
        return [await self._on(order, one, change) for one in self._shards.to_write(order.call, shard)]

    async def done(self, order: Order, shard: str | None, change: Change) -> int:
        """The same; the number of changed rows on all shards."""
        return sum(operation.done for operation in await self.carry_out(order, shard, change))

    async def begin(self, order: Order, one: AdminShard, worker: str) -> Operation:
        """Record the beginning of an order on a shard."""
        now = await one.now()
        for name, text in {"actor": order.actor, "reason": order.reason or ""}.items():
            if (refused := one.database.encoding.why_refused(text)) is not None:
                raise ConfigurationError(f"{name} {refused}: {briefly(text)}")
        operation = order.operation(now, one.database.name)
        async with naming_rights(one.database, order.kind):
            await one.database.operations.insert(self._namespace, operation, worker)
        return operation

    async def end(self, one: AdminShard, operation: Operation, worker: str) -> Operation:
        """Record an end, and log the end. Returns the operation with the date of the end."""
        now = one.clock()
        error = operation.error and one.database.encoding.escaped(operation.error)
        ended = replace(operation, error=error, updated_date=now, finished_date=now)
        self._order_ended()
        if await one.database.operations.finish(self._namespace, ended, worker):
            log_end(ended)
        return ended

    async def _on(self, order: Order, one: AdminShard, change: Change) -> Operation:
        operation = await self.begin(order, one, self.worker)
        try:
            async with naming_rights(one.database, order.kind):
                found = await change(one)
        except Exception as error:
            try:
                await self.end(one, after_error(operation, error, self._redact), self.worker)
            except Exception as lost:  # the first error matters
                logger.warning(
                    "the end of operation %s could not be recorded: %s",
                    operation.id,
                    lost,
                    operation=str(operation.id),
                )
            raise
        numbers = found if isinstance(found, Numbers) else Numbers(found, found)
        if numbers.done:
            one.wake()
        refused = numbers.matched - numbers.done
        ended = replace(
            operation, state=OperationState.DONE, matched=numbers.matched, done=numbers.done, refused=refused
        )
        return await self.end(one, ended, self.worker)


def after_error(operation: Operation, error: Exception, redact: Redact) -> Operation:
    """The operation after an error."""
    told = storable(redact(f"{type_name(error)}: {error}"), LONGEST_TEXT)
    return replace(operation, state=OperationState.FAILED, error=told)


def log_end(operation: Operation) -> None:
    """Log the end of an operation."""
    logger.info(
        "%s by %s is %s: %d of %d notifications changed", operation.kind, operation.actor, operation.state,
        operation.done, operation.matched, operation=str(operation.id), actor=operation.actor, origin=operation.origin,
        reason=operation.reason, shard=operation.shard,
    )  # fmt: skip


def added_up(operations: Sequence[Operation]) -> Operation:
    """The operation of all shards: the numbers added up, the worst state, the first error."""
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


def _given_reason(reason: object) -> str:
    if not isinstance(reason, str) or len(reason) > LONGEST_TEXT:
        raise ConfigurationError(f"reason is {briefly(reason)}; expected a text of at most {LONGEST_TEXT} characters")
    for start in range(0, len(reason), 255):
        given_stored(reason[start : start + 255], "reason")
    return reason
