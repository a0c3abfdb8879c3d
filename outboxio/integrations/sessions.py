"""Events of SQLAlchemy sessions: kept until just before the COMMIT of the session, and dropped by a rollback.

The listeners are registered once per process, on the class ``Session``: listeners on each session would cost more than
the events. A session without outboxio events has no entry in ``Session.info``, and the listeners return at once. The
outbox holds no reference to a session, so a session is garbage-collected once your application drops it.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from greenlet import getcurrent  # type: ignore[import-untyped]  # greenlet has no stubs
from sqlalchemy import Connection, Engine, event, inspect, text
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import InstanceState, Session, SessionTransaction
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from outboxio.errors import ConfigurationError, NoTransaction, TransactionError
from outboxio.model.payloads.classes import AnyEvent, named_by
from outboxio.storage.sqlite.connection import commits_each_statement

_KEY = "outboxio"  # in Session.info: the events of a session
_COMMIT = "outboxio.commit"  # in Session.info: the commit of a session, with or without events


class Sink(Protocol):
    """Where the events of a session go: the transaction of an action, or a buffer."""

    @property
    def events(self) -> list[Any]:
        """The events that no statement has written yet. Rolling back a savepoint removes the last events."""
        ...

    def emit(self, event: AnyEvent, **options: Any) -> None: ...

    def write(self, driver: Any) -> Awaitable[None]:
        """Write ``events`` on the driver's connection, in the open transaction."""
        ...

    def committed(self) -> None:
        """Called when the transaction of the session has committed."""
        ...

    def ended(self) -> None:
        """Called when the transaction of the session has ended and has no event left to write."""
        ...


class Emits(Protocol):
    """The transaction of an action."""

    @property
    def events(self) -> list[Any]: ...

    @property
    def is_closed(self) -> bool: ...

    @property
    def emit(self) -> Callable[..., None]: ...


class Raised:
    """An event raised by an object of a session, waiting for a flush."""

    def __init__(self, number: int, instance: object, event: AnyEvent, options: dict[str, Any]) -> None:
        """``instance``: ``None`` while the object is not in a session."""
        self.number = number
        self.instance = instance
        self.event = event
        self.options = options


class _Commit:
    """The commits and releases of a session that SQLAlchemy has announced, but that have not succeeded."""

    def __init__(self, announced: int) -> None:
        self.announced = announced
        self._greenlet = getcurrent()

    @property
    def has_ended(self) -> bool:
        """True if the call that committed has returned or raised."""
        return bool(self._greenlet.dead)


class _Savepoint(NamedTuple):
    transaction: SessionTransaction
    emitted: int
    """The number of events that were emitted before the savepoint and are not written yet."""
    raised: tuple[Raised, ...]
    """The events that were raised before the savepoint and are not emitted yet."""


class SessionEvents:
    """The events of a session, in the open transaction.

    Events are written only while no savepoint is open, so that no savepoint can roll back an event from outside it.
    """

    def __init__(self, session: Session) -> None:
        self.sink: Sink | None = None
        self.raised: list[Raised] = []
        self._root = session.get_transaction()
        self._savepoints = [_Savepoint(each, 0, ()) for each in _savepoints_of(session)]
        """The open savepoints, outermost first."""

    def require_writable(self, session: Session, call: str) -> None:
        """Raise :class:`TransactionError` if the COMMIT that is running could not write an event."""
        self._follow(session)
        if _is_committing(session) and not in_greenlet():
            raise TransactionError(
                f"{call} while the session commits, from outside the commit: the event would be lost. Emit before "
                "the commit, or directly in a SQLAlchemy listener"
            )

    def emitted(self, session: Session) -> None:
        """Write the events at once if the COMMIT is running: nothing else would write them."""
        if self._writes_at_once(session):
            self._write(session)

    def raised_by(self, session: Session, instance: object, raised: list[Raised]) -> None:
        """Keep events until the next flush. Hold the object as well: a session holds unchanged objects only weakly."""
        for each in raised:
            each.instance = instance
        self.raised.extend(raised)
        if self._writes_at_once(session):  # a flush may not follow
            self.collect(session)

    def collect(self, session: Session) -> None:
        """Pass the events of flushed objects to the sink, in the order in which they were raised."""
        for each in sorted(self.raised, key=lambda each: each.number):
            state: InstanceState[Any] = inspect(each.instance)
            if state.session is not session:
                self.raised.remove(each)
                _keep(state, each)
            elif not state.pending:
                self._sink_for(each).emit(each.event, **{**identity_of(each.instance), **each.options})
                self.raised.remove(each)
        self.emitted(session)

    def released(self) -> None:
        """Move the events of the released savepoint, and of those within it, to the enclosing transaction."""
        self._take_ended()

    def began(self, session: Session, savepoint: SessionTransaction) -> None:
        """Send SAVEPOINT now: SQLAlchemy delays it until its own next statement, and others may come first."""
        self._follow(session)
        self.collect(session)
        self._savepoints.append(self._savepoint(savepoint))
        if self.sink is not None and savepoint.parent is not None:
            try:
                _begin_late(savepoint.parent.connection(None))
                savepoint.connection(None)
            except BaseException:
                savepoint.close()
                raise

    def ended(self, session: Session, transaction: SessionTransaction) -> None:
        """Write the events if that was the last savepoint of a session that commits.

        SQLAlchemy announces such a COMMIT before it releases the savepoints, and not again.
        """
        is_rolled_back = any(each.transaction is transaction for each in self._savepoints)
        self._follow(session)
        has_failed = is_rolled_back and sys.exc_info()[0] is not None  # the whole transaction is being rolled back
        if transaction.nested and not has_failed and self._writes_at_once(session):
            self.collect(session)

    def _follow(self, session: Session) -> None:
        """Drop the events of transactions that have ended, and of savepoints that were not released.

        Other listeners may emit before SQLAlchemy calls ours at the start or the end.
        """
        root = session.get_transaction()
        if root is not self._root:
            self._root = root
            self.raised.clear()
            self._savepoints.clear()
            if self.sink is not None:
                self.sink.ended()
        if (ended := self._take_ended()) is not None:
            self._drop(session, ended)
        if session.in_nested_transaction():
            for each in _savepoints_of(session)[len(self._savepoints) :]:
                self._savepoints.append(self._savepoint(each))

    def _take_ended(self) -> _Savepoint | None:
        """Remove the outermost savepoint that has ended, and those within it, which a listener may have left open."""
        for place, each in enumerate(self._savepoints):
            if not each.transaction.is_active:
                del self._savepoints[place:]
                return each
        return None

    def _savepoint(self, transaction: SessionTransaction) -> _Savepoint:
        return _Savepoint(transaction, len(self.sink.events) if self.sink is not None else 0, tuple(self.raised))

    def _drop(self, session: Session, savepoint: _Savepoint) -> None:
        self.raised = [
            each for each in self.raised if each in savepoint.raised and inspect(each.instance).session is session
        ]
        if self.sink is not None:
            del self.sink.events[savepoint.emitted :]

    def _sink_for(self, raised: Raised) -> Sink:
        if self.sink is None:
            raise ConfigurationError(
                f"{type(raised.instance).__name__} has raised {type(raised.event).__name__} in a session without an "
                "outbox: call outbox.bind(session) before the flush, or work in tx.session"
            )
        return self.sink

    def _writes_at_once(self, session: Session) -> bool:
        return _is_committing(session) and not session.in_nested_transaction() and in_greenlet()

    def _write(self, session: Session) -> None:
        root = session.get_transaction()
        if root is not None and self.sink is not None and self.sink.events:
            await_only(self.sink.write(begun(root.connection(None))))
            # SQLAlchemy loses track of a savepoint that a listener opens in the flush before another savepoint.
            self._savepoints = [each._replace(emitted=0) for each in self._savepoints]


def events_of(session: Session) -> SessionEvents:
    """Return the events of a session, and collect them from now on."""
    found: SessionEvents | None = session.info.get(_KEY)
    if found is None:
        listen()
        if _COMMIT not in session.info and session.in_transaction() and in_greenlet():
            # The transaction began before our listeners were registered, and may be committing.
            session.info[_COMMIT] = _Commit(announced=1)
        found = session.info[_KEY] = SessionEvents(session)
    return found


def _is_committing(session: Session) -> bool:
    commit: _Commit | None = session.info.get(_COMMIT)
    return commit is not None and commit.announced > 0 and not commit.has_ended


def require_open(session: Session, call: str) -> SessionEvents:
    """Begin the transaction of the session, as ``session.add`` does, and return its events.

    Raises :class:`TransactionError` if the transaction has failed or committed, and :class:`NoTransaction` if the
    session must not begin a transaction by itself.
    """
    if not session.is_active:
        raise TransactionError(
            f"{call} in a session whose transaction has failed or ended: an event would be lost. Roll back first, or "
            "emit before the commit"
        )
    if not session.in_transaction():
        if not session.autobegin:
            raise NoTransaction(session)
        session.begin()
    events = events_of(session)
    events.require_writable(session, call)
    return events


def default_bind(session: Session) -> Engine | Connection:
    """Return the engine or connection that a session uses for statements without a mapped class.

    Raises :class:`ConfigurationError` for a session whose engines are all in ``binds``.
    """
    try:
        return session.get_bind()
    except UnboundExecutionError as error:
        raise ConfigurationError(
            "the session has no default engine, so the database of its events is not known: pass an engine to its "
            "sessionmaker, as in async_sessionmaker(engine, binds=...)"
        ) from error


def connection_of(session: Session) -> Connection:
    """Return the connection of the default engine. Raises :class:`ConfigurationError` like :func:`default_bind`."""
    default_bind(session)
    return session.connection()


def identity_of(instance: object) -> dict[str, object]:
    """Return ``model_id`` and ``model_type`` of a mapped object: the primary key, and the name of the class."""
    model_id, model_type = named_by(instance, None, None)
    return {"model_id": model_id, "model_type": model_type}


def begun(connection: Connection) -> Any:
    """Return the driver's own connection, on which the SQLAlchemy transaction has begun.

    SQLAlchemy sends BEGIN with the first statement, so this function sends a statement if none was sent.
    """
    driver = connection.connection.driver_connection
    if not _has_begun(driver):
        connection.execute(text("SELECT 1"))
        _begin_late(connection)
    return driver


def _begin_late(connection: Connection) -> None:
    """Send BEGIN on an aiosqlite connection whose driver sends it neither for SELECT nor for SAVEPOINT."""
    driver: Any = connection.connection.driver_connection
    if getattr(driver, "in_transaction", True):
        return
    if not await_only(driver._execute(commits_each_statement, driver._conn)):
        connection.exec_driver_sql("BEGIN")


def _has_begun(driver: Any) -> bool:
    """True if an asyncpg, psycopg, aiosqlite or sqlite3 connection has a transaction open. Others may not report it."""
    if hasattr(driver, "is_in_transaction"):
        return bool(driver.is_in_transaction())
    pgconn = getattr(driver, "pgconn", None)  # of psycopg, whose status 0 is idle
    return getattr(driver, "in_transaction", False) is True if pgconn is None else bool(pgconn.transaction_status)


def _savepoints_of(session: Session) -> list[SessionTransaction]:
    def from_the_innermost() -> Iterator[SessionTransaction]:
        transaction = session.get_nested_transaction()
        while transaction is not None:
            if transaction.nested:
                yield transaction
            transaction = transaction.parent

    return list(from_the_innermost())[::-1]


class ActionSink:
    """The transaction of an action as a sink: its events are written at the end of the action."""

    def __init__(self, tx: Emits) -> None:
        self._tx = tx

    @property
    def events(self) -> list[Any]:
        return [] if self._tx.is_closed else self._tx.events

    def emit(self, event: AnyEvent, **options: Any) -> None:
        self._tx.emit(event, **options)

    async def write(self, driver: Any) -> None:
        """Do nothing: the end of the action writes the events."""

    def committed(self) -> None:
        """Do nothing: the action itself wakes the loops."""

    def ended(self) -> None:
        """Do nothing: the events end with the action."""


# --- objects that raise events -----------------------------------------------------------------------------

_numbers = count(1)
_unattached: WeakKeyDictionary[InstanceState[Any], list[Raised]] = WeakKeyDictionary()
"""The events of objects outside any session. A value must not refer to its object, which would never be collected."""


def raise_event(instance: object, event: AnyEvent, options: dict[str, Any]) -> None:
    """Keep an event of a mapped object until the next flush of its session."""
    state: InstanceState[Any] = inspect(instance)
    raised = Raised(next(_numbers), None, event, options)
    if (session := state.session) is None:
        _keep(state, raised)
    else:
        require_open(session, "raise_event()").raised_by(session, instance, [raised])


def _keep(state: InstanceState[Any], raised: Raised) -> None:
    raised.instance = None
    _unattached.setdefault(state, []).append(raised)


# --- listeners ---------------------------------------------------------------------------------------------


@cache
def listen() -> None:
    """Register listeners for all sessions of the process. Further calls do nothing."""
    for name, listener in _LISTENERS.items():
        # Ours come first, but before_commit last: your application's listeners may emit.
        event.listen(Session, name, listener, insert=name != "before_commit")


def _before_commit(session: Session) -> None:
    """Write the events, unless savepoints are open.

    Listeners of flushes may emit, so the flush of the COMMIT comes first. SQLAlchemy does not say whether the session
    commits or a savepoint is released, and with open savepoints both can be.
    """
    events: SessionEvents | None = session.info.get(_KEY)
    writes = events is not None and not session.in_nested_transaction()
    if writes:
        session.flush()
    commit: _Commit | None = session.info.get(_COMMIT)
    if commit is None or commit.has_ended:
        session.info[_COMMIT] = _Commit(announced=1)
    else:
        commit.announced += 1
    if events is not None and writes:
        events.collect(session)


def _after_commit(session: Session) -> None:
    events: SessionEvents | None = session.info.get(_KEY)
    if session.in_nested_transaction():
        if (commit := session.info.get(_COMMIT)) is not None:
            commit.announced -= 1
        if events is not None:
            events.released()
    elif events is not None and events.sink is not None:
        events.sink.committed()


def _after_attach(session: Session, instance: object) -> None:
    if _unattached and (state := inspect(instance)) in _unattached:
        events = events_of(session)
        events.require_writable(session, "raise_event()")
        events.raised_by(session, instance, _unattached.pop(state))


def _after_flush_postexec(session: Session, context: object) -> None:
    if (events := session.info.get(_KEY)) is not None:
        events.collect(session)


def _after_transaction_create(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        session.info[_COMMIT] = None
    elif transaction.nested and (events := session.info.get(_KEY)) is not None:
        events.began(session, transaction)


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    if (events := session.info.get(_KEY)) is not None:
        events.ended(session, transaction)


_LISTENERS: dict[str, Any] = {
    "before_commit": _before_commit,
    "after_commit": _after_commit,
    "after_attach": _after_attach,
    "after_flush_postexec": _after_flush_postexec,
    "after_transaction_create": _after_transaction_create,
    "after_transaction_end": _after_transaction_end,
}
