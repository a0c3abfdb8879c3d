"""``perform``: an action without a database."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from outboxio import Action, ConfigurationError, Event, InvalidEvent, StaleRecord, Transaction, TransactionClosed
from outboxio.testing import Statement, perform


class MoneyWithdrawn(Event):
    wallet_id: int
    balance: int


class NotEnoughMoney(Exception):
    pass


class Withdraw(Action):
    wallet_id: int
    amount: int

    async def perform(self, tx: Transaction) -> int:
        balance = await tx.fetchval("SELECT balance\n FROM wallets WHERE id = $1", self.wallet_id)
        if balance < self.amount:
            raise NotEnoughMoney
        balance -= self.amount
        await tx.expect_one("UPDATE wallets SET balance = $1", balance, model_type="Wallet", model_id=self.wallet_id)
        tx.emit(MoneyWithdrawn(self.wallet_id, balance), model_id=self.wallet_id, model_type="Wallet")
        return int(balance)


async def test_an_action_uses_answers_and_returns_result_events_and_statements() -> None:
    performed = await perform(Withdraw(7, 10), answers=[25, 1])

    assert performed.result == 15
    row = performed.events.of(MoneyWithdrawn).one_row(balance=15)
    assert (row.model_id, row.model_type, row.action_name) == ("7", "Wallet", "Withdraw")
    assert performed.statements[0] == Statement("fetchval", "SELECT balance\n FROM wallets WHERE id = $1", (7,))
    assert [statement.method for statement in performed.statements] == ["fetchval", "execute"]


async def test_answers_may_match_a_part_of_the_statement() -> None:
    performed = await perform(Withdraw(7, 10), answers={"UPDATE wallets": 1, "SELECT balance FROM": 12})
    assert performed.result == 2


async def test_errors_of_the_action_are_raised_without_retries() -> None:
    with pytest.raises(NotEnoughMoney):
        await perform(Withdraw(7, 10), answers=[5])
    with pytest.raises(StaleRecord):
        await perform(Withdraw(7, 10), answers=[25, 0])


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([25], "no answer to statement 2, tx.execute\\('UPDATE wallets"),
        ([25, 1, 9], "unused answers: 9; the statements were:\n  tx.fetchval"),
        (
            {"UPDATE": 1},
            r"expected one answer to tx.fetchval\('SELECT balance FROM wallets.*found 0; answers: 'UPDATE'",
        ),
        ({"wallets": 25, "balance": 25}, "expected one answer to tx.fetchval.*found 2"),
        ([25, "one"], "'one'; expected the number of rows"),
    ],
)
async def test_a_missing_unused_or_invalid_answer_fails_the_test(answers: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        await perform(Withdraw(7, 10), answers=answers)


async def test_events_are_validated_as_in_an_outbox() -> None:
    class EmitsNonsense(Action):
        async def perform(self, tx: Transaction) -> None:
            nonsense: Any = "seven"
            tx.emit(MoneyWithdrawn(nonsense, 1))

    with pytest.raises(InvalidEvent, match="wallet_id"):
        await perform(EmitsNonsense())


async def test_the_transaction_has_all_attributes_and_ends_with_the_action() -> None:
    class Looks(Action):
        async def perform(self, tx: Transaction) -> Any:
            rows = await tx.fetch("SELECT 1"), await tx.fetchrow("SELECT 2")
            return rows, tx.session, tx.resources, tx.now, tx  # type: ignore[attr-defined, unused-ignore]

    session, now = object(), datetime(2026, 1, 1)
    performed = await perform(Looks(), answers=[[(1,)], None], session=session, resources="mail", now=now)

    *seen, tx = performed.result
    assert seen == [([(1,)], None), session, "mail", now]
    with pytest.raises(TransactionClosed):
        tx.emit(MoneyWithdrawn(1, 1))


async def test_anything_that_needs_a_database_is_refused() -> None:
    class UsesConnection(Action):
        async def perform(self, tx: Transaction) -> Any:
            return tx.connection

    class UsesSession(Action):
        async def perform(self, tx: Transaction) -> Any:
            return tx.session  # type: ignore[attr-defined, unused-ignore]

    with pytest.raises(ConfigurationError, match=r"uses tx\.connection"):
        await perform(UsesConnection())
    with pytest.raises(ConfigurationError, match=r"pass perform\(\.\.\., session="):
        await perform(UsesSession())
    given: Any = "Withdraw"
    with pytest.raises(InvalidEvent, match="is not an Action"):
        await perform(given)
