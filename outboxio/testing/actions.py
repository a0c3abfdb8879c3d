"""Perform an action without a database: prepared answers instead of statements, and the emitted events.

Prepared answers prove nothing about the SQL. Where the statements matter, use an outbox in memory or the database you
deploy on. Without a database, a test of the rules in ``perform`` takes less than a millisecond.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic

from msgspec import Struct

from outboxio.errors import ConfigurationError
from outboxio.model.action import Performs, Result_co, name_and_retries
from outboxio.model.emitter import Emitter, encode_params
from outboxio.model.event import ActionRecord, EventRecord, EventTypes
from outboxio.support.clock import utc_now
from outboxio.support.ids import uuid7
from outboxio.support.text import briefly
from outboxio.testing.emitted import EmittedEvents, watch_events
from outboxio.transaction import Transaction

Answers = Sequence[object] | Mapping[str, object]
"""Prepared answers, in the order of the statements or by a part of their SQL."""


class Statement(Struct, frozen=True):
    """A statement that an action ran: the method of ``tx``, the SQL and the arguments."""

    method: str
    sql: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return f"tx.{self.method}({' '.join(self.sql.split())!r}{''.join(f', {arg!r}' for arg in self.args)})"


class Performed(Generic[Result_co]):
    """The result of :func:`perform`."""

    def __init__(self, result: Result_co, events: EmittedEvents, statements: Sequence[Statement]) -> None:
        self.result = result
        """The return value of the action."""
        self.events = events
        """The emitted events."""
        self.statements = statements
        """The statements, in order."""


async def perform(
    action: Performs[Result_co],
    *,
    answers: Answers = (),
    session: Any = None,
    resources: Any = None,
    now: datetime | None = None,
) -> Performed[Result_co]:
    """Run ``action.perform`` on a transaction without a database.

    ``answers`` are the results of the statements: the number of rows for ``execute`` and ``expect_one``, a list of rows
    for ``fetch``, a row or ``None`` for ``fetchrow``, a value for ``fetchval``. A list must be used up, in order. A
    mapping answers every statement whose SQL contains the key. ``session`` becomes ``tx.session``, such as a stub.
    ``now`` becomes ``tx.now``; by default the current time.

    Events are validated as by ``emit``. Errors of the action are raised, and nothing is retried. Raises
    ``AssertionError`` for a statement without an answer, and for an unused answer.

    Example::

        performed = await perform(WithdrawMoney(wallet_id, 10), answers={"SELECT balance": 25, "UPDATE wallets": 1})
        assert performed.events.of(MoneyWithdrawn).one().balance == 15
        with pytest.raises(StaleRecord):
            await perform(WithdrawMoney(wallet_id, 10), answers={"SELECT balance": 25, "UPDATE wallets": 0})
    """
    name, _ = name_and_retries(action)
    started = now or utc_now()
    record = ActionRecord(
        namespace="test",
        action_id=uuid7(),
        action_name=name,
        action_params=encode_params(action, name, stores_nul=False),
        started_date=started,
        completion_date=started,
    )
    script = _Script(answers)
    tx = ScriptedTransaction(script, record, session=session, resources=resources)
    with watch_events() as events:
        performing = action.perform(tx)
        if not inspect.isawaitable(performing):  # callers may not be typed
            raise TypeError(f"{name}.perform is not async: write `async def perform(self, tx)`")
        result: Result_co = await performing
        tx.close()
        script.require_all_used()
        events.written(record, tx.events)
    return Performed(result, events, script.statements)


class ScriptedTransaction(Transaction):
    """A transaction whose statements return prepared answers."""

    def __init__(self, script: _Script, record: ActionRecord, *, session: Any, resources: Any) -> None:
        emitter = Emitter(EventTypes(), stores_nul=False, max_hops=32)
        nothing: Any = None  # no statement reaches a database
        super().__init__(nothing, emitter, record, shard="default", resources=resources, cause=None)
        self._script = script
        self._stub_session = session

    @property
    def connection(self) -> Any:
        """There is no connection."""
        raise ConfigurationError(
            f"{self.action_name} uses tx.connection, which does not exist in perform(): run the action in an outbox"
        )

    @property
    def session(self) -> Any:
        """The session passed to :func:`perform`."""
        if self._stub_session is None:
            raise ConfigurationError(f"{self.action_name} uses tx.session: pass perform(..., session=...)")
        return self._stub_session

    async def execute(self, sql: str, *args: Any) -> int:
        touched: int = self._script.take("execute", sql, args, _is_number, "the number of rows")
        return touched

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        return list(self._script.take("fetch", sql, args, _is_rows, "a list of rows"))

    async def fetchrow(self, sql: str, *args: Any) -> Any | None:
        return self._script.take("fetchrow", sql, args, _is_anything, "")

    async def fetchval(self, sql: str, *args: Any) -> Any:
        return self._script.take("fetchval", sql, args, _is_anything, "")

    async def write(self, record: ActionRecord, events: Sequence[EventRecord]) -> None:
        raise ConfigurationError(f"{self.action_name} has no database to write to")


class _Script:
    """Returns the prepared answers and records the statements."""

    def __init__(self, answers: Answers) -> None:
        self.statements: list[Statement] = []
        self._by_text: Mapping[str, object] | None = answers if isinstance(answers, Mapping) else None
        self._in_order = [] if isinstance(answers, Mapping) else list(answers)

    def take(
        self, method: str, sql: str, args: tuple[Any, ...], is_valid: Callable[[object], bool], expected: str
    ) -> Any:
        statement = Statement(method, sql, args)
        self.statements.append(statement)
        answer = self._next(statement) if self._by_text is None else self._found(statement, self._by_text)
        if not is_valid(answer):
            raise AssertionError(f"invalid answer to {statement}: {briefly(answer)}; expected {expected}")
        return answer

    def _next(self, statement: Statement) -> object:
        if not self._in_order:
            raise AssertionError(f"no answer to statement {len(self.statements)}, {statement}")
        return self._in_order.pop(0)

    def _found(self, statement: Statement, by_text: Mapping[str, object]) -> object:
        found = [answer for part, answer in by_text.items() if _compact(part) in _compact(statement.sql)]
        if len(found) != 1:
            keys = ", ".join(map(repr, by_text)) or "(none)"
            raise AssertionError(f"expected one answer to {statement}, found {len(found)}; answers: {keys}")
        return found[0]

    def require_all_used(self) -> None:
        if self._in_order:
            unused = ", ".join(map(briefly, self._in_order))
            run = "\n  ".join(map(str, self.statements)) or "(none)"
            raise AssertionError(f"unused answers: {unused}; the statements were:\n  {run}")


def _compact(sql: str) -> str:
    return " ".join(sql.split())


def _is_number(answer: object) -> bool:
    return isinstance(answer, int) and not isinstance(answer, bool)


def _is_rows(answer: object) -> bool:
    return isinstance(answer, Sequence) and not isinstance(answer, str | bytes)


def _is_anything(answer: object) -> bool:
    return True
