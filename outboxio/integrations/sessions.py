"""Events of SQLAlchemy sessions: kept until just before the COMMIT of the session, and dropped by a rollback.

The listeners are on the class ``Session``, once for the process: a listener for each session would cost more than the
events. Sessions without events of outboxio have no entry in ``Session.info``, and the listeners return at once. The
outbox knows no session, so a session is garbage as soon as the application forgets the session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event, inspect, text
from sqlalchemy.orm import InstanceState, Session, SessionTransaction
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from outboxio.errors import ConfigurationError, NoTransaction, TransactionError
from outboxio.payloads.classes import AnyEvent
from outboxio.payloads.mapped import named_by

_KEY = "outboxio"  # in Session.info


class Sink(Protocol):
    """The place to which the events of a session go: the transaction of an action, or a buffer."""

    @property
    def events(self) -> list[Any]:
        """The events that no statement has written yet. A savepoint that is rolled back removes the last events."""
        ...

    def emit(self, event: AnyEvent, **options: Any) -> None: ...

    def write(self, driver: Any) -> Awaitable[None]:
        """Write ``events`` on the driver's connection, in the open transaction."""
        ...

    def committed(self) -> None:
        """The transaction of the session has committed."""
        ...

    def ended(self) -> None:
        """The transaction of the session has ended: no event of the transaction is left to write."""
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
    """An event that an object of a session has raised, and that waits for a flush."""

    def __init__(self, number: int, instance: object, event: AnyEvent, options: dict[str, Any]) -> None:
        """``instance``: ``None`` while the object is in no session."""
        self.number = number
        self.instance = instance
        self.event = event
        self.options = options


class SessionEvents:
    """The events of a session, in the open transaction."""

    def __init__(self, session: Session) -> None:
        self.sink: Sink | None = None
        self.raised: list[Raised] = []
        self._savepoints: list[tuple[SessionTransaction, int]] = [(each, 0) for each in _savepoints_of(session)]
        """The open savepoints, from the outermost, each with the number of events before."""
        self._ending: SessionTransaction | None = None
        self._writes_at_once = False
        """True from the first INSERT at COMMIT until the transaction ends."""

    def emitted(self, session: Session) -> None:
        """Write an event that was emitted after the INSERT, by a listener that ran during COMMIT."""
        if self._writes_at_once and in_greenlet():
            self._write(session)

    def collect(self, session: Session) -> None:
        """Give the events of flushed objects to the sink, in the order in which the events were raised."""
        for each in sorted(self.raised, key=lambda each: each.number):
            state: InstanceState[Any] = inspect(each.instance)
            if state.session is not session:
                self.raised.remove(each)
                _keep(state, each)
            elif not state.pending:
                self._sink_for(each).emit(each.event, **{**identity_of(each.instance), **each.options})
                self.raised.remove(each)
        self.emitted(session)

    def before_commit(self, session: Session) -> None:
        """Write the events, unless only a savepoint is released.

        Listeners of flushes may emit, so the flush of the COMMIT comes first. SQLAlchemy does not say what commits. A
        transaction that commits with open savepoints announces the commit first, and then each savepoint announces the
        release. So two announcements with the same innermost savepoint mean that more than this savepoint ends.
        """
        session.flush()
        self.collect(session)
        innermost = session.get_nested_transaction()
        if innermost is None or innermost is self._ending:
            self._write(session)
        self._ending = innermost

    def after_commit(self, session: Session) -> None:
        released = session.get_nested_transaction()
        if released is None:
            if self.sink is not None:
                self.sink.committed()
        elif self._savepoints and self._savepoints[-1][0] is released:
            self._savepoints.pop()

    def began(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.nested:
            self.collect(session)
            self._savepoints.append((transaction, len(self.sink.events) if self.sink is not None else 0))

    def ended(self, transaction: SessionTransaction) -> None:
        """Drop the events of a transaction, or of a savepoint that was not released."""
        self._ending = None
        if transaction.nested:
            if self._savepoints and self._savepoints[-1][0] is transaction:
                _, before = self._savepoints.pop()
                self.raised.clear()
                if self.sink is not None:
                    del self.sink.events[before:]
        elif transaction.parent is None:
            self.raised.clear()
            self._savepoints.clear()
            self._writes_at_once = False
            if self.sink is not None:
                self.sink.ended()

    def _sink_for(self, raised: Raised) -> Sink:
        if self.sink is None:
            raise ConfigurationError(
                f"{type(raised.instance).__name__} has raised {type(raised.event).__name__} in a session without an "
                "outbox: call outbox.bind(session) before the flush, or work in tx.session"
            )
        return self.sink

    def _write(self, session: Session) -> None:
        sink = self.sink
        self._writes_at_once = True
        if sink is not None and sink.events:
            await_only(sink.write(begun(session.connection())))
            self._savepoints = [(savepoint, 0) for savepoint, _ in self._savepoints]


def events_of(session: Session) -> SessionEvents:
    """The events of a session, from now on."""
    found: SessionEvents | None = session.info.get(_KEY)
    if found is None:
        listen()
        found = session.info[_KEY] = SessionEvents(session)
    return found


def require_open(session: Session, call: str) -> None:
    """Begin the transaction of the session, as ``session.add`` does.

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


def identity_of(instance: object) -> dict[str, object]:
    """``model_id`` and ``model_type`` of a mapped object: the primary key, and the name of the class."""
    model_id, model_type = named_by(instance, None, None)
    return {"model_id": model_id, "model_type": model_type}


def begun(connection: Connection) -> Any:
    """The driver's own connection, on which the transaction of SQLAlchemy has begun.

    SQLAlchemy sends BEGIN with the first statement, so this function sends a statement if none was sent.
    """
    driver = connection.connection.driver_connection
    if not _has_begun(driver):
        connection.execute(text("SELECT 1"))
        if _begins_when_it_writes(driver):
            connection.exec_driver_sql("BEGIN")
    return driver


def _has_begun(driver: Any) -> bool:
    """True if a connection of asyncpg, aiosqlite or sqlite3 has a transaction open. Other drivers may not say."""
    if hasattr(driver, "is_in_transaction"):
        return bool(driver.is_in_transaction())
    return getattr(driver, "in_transaction", False) is True


def _begins_when_it_writes(driver: Any) -> bool:
    """True for a connection of sqlite3 in the mode in which a SELECT begins no transaction."""
    return getattr(driver, "in_transaction", True) is False and getattr(driver, "isolation_level", None) is not None


def _savepoints_of(session: Session) -> list[SessionTransaction]:
    def from_the_innermost() -> Iterator[SessionTransaction]:
        transaction = session.get_nested_transaction()
        while transaction is not None:
            if transaction.nested:
                yield transaction
            transaction = transaction.parent

    return list(from_the_innermost())[::-1]


class ActionSink:
    """The transaction of an action as a sink: its events are written with the end of the action."""

    def __init__(self, tx: Emits) -> None:
        self._tx = tx

    @property
    def events(self) -> list[Any]:
        return [] if self._tx.is_closed else self._tx.events

    def emit(self, event: AnyEvent, **options: Any) -> None:
        self._tx.emit(event, **options)

    async def write(self, driver: Any) -> None:
        """The end of the action writes the events."""

    def committed(self) -> None:
        """The action itself wakes the loops."""

    def ended(self) -> None:
        """The events of the action end with the action."""


# --- objects that raise events -----------------------------------------------------------------------------

_numbers = count(1)
_unattached: WeakKeyDictionary[InstanceState[Any], list[Raised]] = WeakKeyDictionary()
"""The events of objects in no session. The values must not refer to the objects, or no object would become garbage."""


def raise_event(instance: object, event: AnyEvent, options: dict[str, Any]) -> None:
    """Keep an event of a mapped object until the next flush of the session of the object."""
    listen()
    state: InstanceState[Any] = inspect(instance)
    raised = Raised(next(_numbers), None, event, options)
    if (session := state.session) is None:
        _keep(state, raised)
    else:
        require_open(session, "raise_event()")
        _join(session, instance, [raised])


def _keep(state: InstanceState[Any], raised: Raised) -> None:
    raised.instance = None
    _unattached.setdefault(state, []).append(raised)


def _join(session: Session, instance: object, raised: list[Raised]) -> None:
    """Hold the object as well: a session holds unchanged objects only weakly."""
    for each in raised:
        each.instance = instance
    events_of(session).raised.extend(raised)


# --- listeners ---------------------------------------------------------------------------------------------


@cache
def listen() -> None:
    """Listen to all sessions of the process. Further calls do nothing."""
    for name, listener in _LISTENERS.items():
        event.listen(Session, name, listener)


def _before_commit(session: Session) -> None:
    if (events := session.info.get(_KEY)) is not None:
        events.before_commit(session)


def _after_commit(session: Session) -> None:
    if (events := session.info.get(_KEY)) is not None:
        events.after_commit(session)


def _after_attach(session: Session, instance: object) -> None:
    if _unattached and (raised := _unattached.pop(inspect(instance), None)) is not None:
        _join(session, instance, raised)


def _after_flush_postexec(session: Session, context: object) -> None:
    if (events := session.info.get(_KEY)) is not None:
        events.collect(session)


def _after_transaction_create(session: Session, transaction: SessionTransaction) -> None:
    if (events := session.info.get(_KEY)) is not None:
        events.began(session, transaction)


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    if (events := session.info.get(_KEY)) is not None:
        events.ended(transaction)


_LISTENERS: dict[str, Any] = {
    "before_commit": _before_commit,
    "after_commit": _after_commit,
    "after_attach": _after_attach,
    "after_flush_postexec": _after_flush_postexec,
    "after_transaction_create": _after_transaction_create,
    "after_transaction_end": _after_transaction_end,
}
