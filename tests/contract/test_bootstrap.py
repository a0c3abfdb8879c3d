"""Bootstrap: a handler gets one event per row, in order, while other transactions write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from datetime import UTC, datetime
from typing import Any

import pytest

from outboxio import (
    Action,
    ConfigurationError,
    Event,
    EventEnvelope,
    InvalidEvent,
    Operation,
    Outbox,
    SelfDeadlock,
    Snapshot,
    Transaction,
    UnknownHandler,
)
from outboxio.operations import bootstrapping
from outboxio.runs import ordering
from tests.kit.app import Look, MoneyDeposited, eventually
from tests.kit.inside import database_of, session_of, shard_of
from tests.kit.sql import sql

MakeOutbox = Callable[..., Awaitable[Outbox]]


class WalletChanged(Event):
    wallet_id: str
    balance: int
    version: int


class Other(Event):
    pass


class Change(Action):
    wallet_id: str
    amount: int

    async def perform(self, tx: Transaction) -> None:
        update = "UPDATE wallets SET balance = balance + $1, version = version + 1 WHERE id = $2"
        await tx.execute(sql(tx, update), self.amount, self.wallet_id)
        [row] = await tx.fetch(sql(tx, "SELECT id, balance, version FROM wallets WHERE id = $1"), self.wallet_id)
        tx.emit(to_event(row), model_id=self.wallet_id, model_type="Wallet")


def to_event(row: Any) -> WalletChanged:
    return WalletChanged(row["id"], row["balance"], row["version"])


def share_lock(tx: Transaction) -> str:
    dialect = type(session_of(tx)).__module__.split(".")[2]
    return {"postgres": "FOR SHARE", "mysql": "LOCK IN SHARE MODE"}.get(dialect, "")


async def rows(tx: Transaction, after: str | None, limit: int) -> Sequence[Any]:
    query = f"SELECT id, balance, version FROM wallets WHERE id > $1 ORDER BY id LIMIT $2 {share_lock(tx)}"
    return await tx.fetch(sql(tx, query), after or "", limit)


class Seen:
    """Records the balances of each wallet, in the order of the runs."""

    def __init__(self) -> None:
        self.balances: dict[str, list[int]] = {}

    async def __call__(self, envelope: EventEnvelope[Any]) -> None:
        self.balances.setdefault(envelope.model_id or "", []).append(envelope.event.balance)


def view_of(outbox: Outbox, name: str = "view", **options: Any) -> Seen:
    seen = Seen()
    outbox.handler(WalletChanged, name=name, **options)(seen)
    return seen


async def open_wallets(look: Look, number: int) -> list[str]:
    ids = [f"w{n:03}" for n in range(number)]
    values = ", ".join(f"('{id}', {n}, 1)" for n, id in enumerate(ids))
    await look.fetch(f"INSERT INTO wallets (id, balance, version) VALUES {values}")
    return ids


def numbers(operation: Operation) -> tuple[str, int, int, int]:
    return str(operation.state), operation.matched, operation.done, operation.refused


async def fails_at(outbox: Outbox, call: int, **options: Any) -> None:
    """A bootstrap whose read fails at the given call."""
    calls = 0

    async def failing(tx: Transaction, after: str | None, limit: int) -> Sequence[Any]:
        nonlocal calls
        calls += 1
        if calls == call:
            raise ArithmeticError("no disk")
        return await rows(tx, after, limit)

    with pytest.raises(ArithmeticError, match="no disk"):
        await outbox.bootstrap("view", failing, to_event, key="id", **options)


async def is_blocked(look: Look) -> bool:
    return await look.states() == {"BLOCKED": 1}


# --- rows ------------------------------------------------------------------------------------------


async def test_only_the_bootstrapped_handler_gets_each_row_once(outbox: Outbox, look: Look) -> None:
    seen, other = view_of(outbox), view_of(outbox, "other")
    ids = await open_wallets(look, 7)

    operation = await outbox.bootstrap("view", rows, to_event, key="id", chunk=3)
    await outbox.drain()

    assert seen.balances == {id: [n] for n, id in enumerate(ids)}
    assert other.balances == {}
    assert (operation.kind, *numbers(operation)) == ("bootstrap", "DONE", 7, 7, 0)
    assert operation.request == {"handler": "view", "key": ["id"], "chunk": 3}
    assert await outbox.admin.operations() == [operation]
    assert {row["action_name"] for row in await look.fetch("SELECT action_name FROM {events}")} == {
        "outboxio.bootstrap"
    }
    # An operator cannot give the snapshots to a different handler either.
    assert await outbox.admin.backfill("other", since=datetime(2000, 1, 1)) == 0


async def test_a_finished_bootstrap_emits_nothing_unless_repeated(outbox: Outbox, look: Look) -> None:
    seen = view_of(outbox)
    [id] = await open_wallets(look, 1)
    first = await outbox.bootstrap("view", rows, to_event, key="id")

    assert await outbox.bootstrap("view", rows, to_event, key="id") == first
    again = await outbox.bootstrap("view", rows, to_event, key="id", again=True)
    await outbox.drain()

    assert seen.balances == {id: [0, 0]}
    assert (again.id, *numbers(again)) == (first.id, "DONE", 1, 1, 0)
    assert await database_of(outbox).operations.remove_old("app", datetime(9000, 1, 1), 10) == 0


async def test_rows_without_an_event_are_skipped(outbox: Outbox, look: Look) -> None:
    seen = view_of(outbox)
    await open_wallets(look, 4)

    def odd_ones(row: Any) -> WalletChanged | None:
        return to_event(row) if row["balance"] % 2 else None

    operation = await outbox.bootstrap("view", rows, odd_ones, key="id", chunk=1)
    await outbox.drain()

    assert seen.balances == {"w001": [1], "w003": [3]}
    assert numbers(operation) == ("DONE", 4, 2, 2)


async def test_keys_may_have_several_columns_and_snapshots_a_model(outbox: Outbox, look: Look) -> None:
    seen = view_of(outbox, ordered=True)
    await open_wallets(look, 3)
    reached: list[Any] = []

    async def by_two(tx: Transaction, after: tuple[int, str] | None, limit: int) -> Sequence[Any]:
        reached.append(after)
        return await rows(tx, after and after[1], limit)

    def named(row: Any) -> Snapshot:
        return Snapshot(to_event(row), model_id=f"m-{row['id']}", model_type="Wallet")

    await outbox.bootstrap("view", by_two, named, key=["version", "id"], chunk=2)
    await outbox.drain()

    assert reached == [None, (1, "w001"), (1, "w002")]
    assert seen.balances == {"m-w000": [0], "m-w001": [1], "m-w002": [2]}


async def test_a_relay_sends_the_rows_to_another_service(outbox: Outbox, look: Look) -> None:
    relay, other = view_of(outbox, relay=True), view_of(outbox, "other", relay=True)
    [id] = await open_wallets(look, 1)
    await outbox.bootstrap("view", rows, to_event, key="id")
    await outbox.drain()
    assert (relay.balances, other.balances) == ({id: [0]}, {})


# --- order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["type", "topic", "many"])
async def test_older_events_waiting_for_fan_out_come_first(
    make_outbox: MakeOutbox, look: Look, wallets_table: None, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    by_topic = {"topic": "wallets"} if case == "topic" else {}
    if case == "many":
        monkeypatch.setattr(ordering, "_MOST_OLDER", 1)  # the keys of later events are unknown
    outbox, other = await make_outbox(), await make_outbox()
    seen = view_of(outbox, ordered=True, **by_topic)
    view_of(other, ordered=True, **by_topic)
    [id] = await open_wallets(look, 1)
    async with outbox.running(fanout=False):
        async with outbox.transaction("Change") as tx:
            await tx.execute("UPDATE wallets SET balance = 5")
            tx.emit(WalletChanged(id, 4, 2), model_id=id, topic="wallets")
        await outbox.bootstrap("view", rows, to_event, key="id")
        await eventually(lambda: is_blocked(look))
        assert seen.balances == {}
        async with other.running(handling=False):
            await eventually(lambda: seen.balances.get(id) == [4, 5])


async def test_a_change_during_a_chunk_comes_after_its_row(outbox: Outbox, look: Look) -> None:
    seen = view_of(outbox, ordered=True)
    ids = await open_wallets(look, 3)
    changes: list[asyncio.Task[Any]] = []

    async def beside_a_writer(tx: Transaction, after: str | None, limit: int) -> Sequence[Any]:
        found = await rows(tx, after, limit)
        for row in found:
            change = outbox.execute(Change(row["id"], 10))
            changes.append(asyncio.get_running_loop().create_task(change, context=Context()))
        return found

    await outbox.bootstrap("view", beside_a_writer, to_event, key="id", chunk=2)
    await asyncio.gather(*changes)
    await outbox.drain()

    assert seen.balances == {id: [n, n + 10] for n, id in enumerate(ids)}


async def test_a_handler_since_now_gets_changes_of_earlier_transactions(outbox: Outbox, look: Look) -> None:
    seen = view_of(outbox, since="now")
    [id] = await open_wallets(look, 1)
    await outbox.execute(Change(id, 1))
    await outbox.bootstrap("view", rows, to_event, key="id")
    await outbox.drain()
    assert sorted(seen.balances[id]) == [1, 1]


async def test_a_known_handler_that_adds_since_now_keeps_its_old_events(
    make_outbox: MakeOutbox, look: Look, wallets_table: None
) -> None:
    former, outbox = await make_outbox(), await make_outbox()
    view_of(former)
    [id] = await open_wallets(look, 1)
    async with former.running(handling=False):
        await former.execute(Change(id, 1))
        await eventually(lambda: has_rows(look, 1))
    await look.fetch("UPDATE {event_notifications} SET event_date = '2000-01-01 00:00:00.000000'")
    seen = view_of(outbox, since="now")
    await outbox.bootstrap("view", rows, to_event, key="id")
    await outbox.drain()
    assert seen.balances == {id: [1, 1]}


# --- failures, stops and restarts ------------------------------------------------------------------


async def test_a_call_after_an_error_continues_at_the_last_position(outbox: Outbox, look: Look) -> None:
    seen = view_of(outbox)
    ids = await open_wallets(look, 5)
    await fails_at(outbox, 3, chunk=2)
    [failed] = await outbox.admin.operations()
    assert (*numbers(failed), failed.error) == ("FAILED", 4, 4, 0, "ArithmeticError: no disk")

    operation = await outbox.bootstrap("view", rows, to_event, key="id", chunk=2)
    await outbox.drain()

    assert seen.balances == {id: [n] for n, id in enumerate(ids)}
    assert (operation.id, *numbers(operation), operation.error) == (failed.id, "DONE", 5, 5, 0, None)


async def test_a_position_is_only_valid_for_its_key(outbox: Outbox, look: Look) -> None:
    view_of(outbox)
    await open_wallets(look, 3)
    await fails_at(outbox, 2, chunk=2)
    with pytest.raises(ConfigurationError, match=r"was started with key=\['id'\], and key is now \['balance'\]"):
        await outbox.bootstrap("view", rows, to_event, key="balance")


async def waiting(outbox: Outbox, look: Look, monkeypatch: pytest.MonkeyPatch) -> asyncio.Task[Operation]:
    """A bootstrap that has processed a chunk of 1 row and waits for the handler."""
    monkeypatch.setattr(bootstrapping, "MAX_BACKLOG", 1)
    monkeypatch.setattr(bootstrapping, "CHECK_DELAY", 0.01)
    task = asyncio.ensure_future(outbox.bootstrap("view", rows, to_event, key="id", chunk=1))
    await eventually(lambda: has_rows(look, 1))
    return task


async def has_rows(look: Look, number: int) -> bool:
    return sum((await look.states()).values()) == number


async def test_a_bootstrap_waits_while_its_handler_has_a_backlog(
    outbox: Outbox, look: Look, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bootstrapping, "LONG_WAIT", 1)
    seen = view_of(outbox)
    ids = await open_wallets(look, 3)
    task = await waiting(outbox, look, monkeypatch)
    await eventually(lambda: "bootstrap of handler 'view' is waiting" in caplog.text)
    assert await has_rows(look, 1)
    while not task.done():
        await outbox.drain()
    assert numbers(await task) == ("DONE", 3, 3, 0)
    assert list(seen.balances) == ids


async def test_an_operator_stops_it_and_the_next_call_continues(
    outbox: Outbox, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = view_of(outbox)
    ids = await open_wallets(look, 3)
    task = await waiting(outbox, look, monkeypatch)
    [running] = await outbox.admin.operations()
    assert await outbox.admin.stop(running.id)
    assert numbers(await task) == ("STOPPED", 1, 1, 0)

    monkeypatch.undo()
    operation = await outbox.bootstrap("view", rows, to_event, key="id", chunk=1)
    await outbox.drain()

    assert seen.balances == {id: [n] for n, id in enumerate(ids)}
    assert numbers(operation) == ("DONE", 3, 3, 0)


async def test_a_cancelled_call_stops_and_the_next_continues(
    outbox: Outbox, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = view_of(outbox)
    ids = await open_wallets(look, 3)
    task = await waiting(outbox, look, monkeypatch)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [stopped] = await outbox.admin.operations()
    assert numbers(stopped) == ("STOPPED", 1, 1, 0)

    monkeypatch.undo()
    await outbox.bootstrap("view", rows, to_event, key="id")
    await outbox.drain()
    assert seen.balances == {id: [n] for n, id in enumerate(ids)}


async def test_one_of_two_calls_works_and_both_return_the_result(
    make_outbox: MakeOutbox, look: Look, wallets_table: None
) -> None:
    one, two = await make_outbox(), await make_outbox()
    seen = view_of(one)
    view_of(two)
    ids = await open_wallets(look, 20)
    calls = (each.bootstrap("view", rows, to_event, key="id", chunk=2) for each in (one, two))
    first, second = await asyncio.gather(*calls)
    await one.drain()

    assert first == second
    assert numbers(first) == ("DONE", 20, 20, 0)
    assert seen.balances == {id: [n] for n, id in enumerate(ids)}


async def dies_at(outbox: Outbox, look: Look, call: int) -> Operation:
    """A bootstrap whose process died long ago."""
    await fails_at(outbox, call, chunk=1)
    await look.fetch(
        "UPDATE {operations} SET state = 'RUNNING', worker = 'gone', finished_date = NULL, error = NULL, "
        "updated_date = '2000-01-01 00:00:00.000000'"
    )
    [operation] = await outbox.admin.operations()
    return operation


async def test_only_a_new_call_continues_after_a_crash(outbox: Outbox, look: Look) -> None:
    seen = view_of(outbox)
    ids = await open_wallets(look, 3)
    died = await dies_at(outbox, look, 3)
    await shard_of(outbox).takeover(lambda: True).run_once()
    assert await outbox.admin.operations() == [died]

    operation = await outbox.bootstrap("view", rows, to_event, key="id")
    await outbox.drain()

    assert seen.balances == {id: [n] for n, id in enumerate(ids)}
    assert numbers(operation) == ("DONE", 3, 3, 0)


async def test_a_crashed_bootstrap_can_be_stopped(outbox: Outbox, look: Look) -> None:
    view_of(outbox)
    await open_wallets(look, 3)
    died = await dies_at(outbox, look, 3)
    assert await outbox.admin.stop(died.id)
    await shard_of(outbox).takeover(lambda: True).run_once()
    found = await outbox.admin.operation(died.id)
    assert found is not None
    assert (*numbers(found), found.error) == ("STOPPED", 2, 2, 0, None)


async def test_a_call_stops_a_crashed_bootstrap_with_a_pending_stop(outbox: Outbox, look: Look) -> None:
    view_of(outbox)
    await open_wallets(look, 3)
    died = await dies_at(outbox, look, 3)
    assert await outbox.admin.stop(died.id)
    async with asyncio.timeout(20):  # no other process ends it
        assert numbers(await outbox.bootstrap("view", rows, to_event, key="id")) == ("STOPPED", 2, 2, 0)
    assert numbers(await outbox.bootstrap("view", rows, to_event, key="id")) == ("DONE", 3, 3, 0)


async def test_again_starts_from_the_beginning_after_a_crash(outbox: Outbox, look: Look) -> None:
    seen = view_of(outbox)
    await open_wallets(look, 3)
    await dies_at(outbox, look, 3)
    operation = await outbox.bootstrap("view", rows, to_event, key="id", again=True)
    await outbox.drain()
    assert numbers(operation) == ("DONE", 3, 3, 0)
    assert seen.balances == {"w000": [0, 0], "w001": [1, 1], "w002": [2]}


async def test_a_renamed_handler_keeps_its_bootstrap(make_outbox: MakeOutbox, look: Look, wallets_table: None) -> None:
    former, outbox = await make_outbox(), await make_outbox()
    view_of(former)
    ids = await open_wallets(look, 3)
    await fails_at(former, 2, chunk=2)
    seen = view_of(outbox, "list", aliases=["view"])
    operation = await outbox.bootstrap("list", rows, to_event, key="id")
    assert await outbox.bootstrap("list", rows, to_event, key="id") == operation
    await outbox.drain()
    assert seen.balances == {id: [n] for n, id in enumerate(ids)}


# --- what is refused -------------------------------------------------------------------------------


async def test_arguments_are_refused_before_anything_is_written(outbox: Outbox, look: Look) -> None:
    view_of(outbox)

    async def refused(message: str, error: type[Exception] = ConfigurationError, **changed: Any) -> None:
        given: dict[str, Any] = {"handler": "view", "rows": rows, "to_event": to_event, "key": "id", **changed}
        with pytest.raises(error, match=message):
            await outbox.bootstrap(**given)

    await refused("there is no handler 'vew' in namespace 'app'.*'view'", UnknownHandler, handler="vew")
    await refused("chunk is 0; expected a number of rows from 1 to 10,000", chunk=0)
    await refused("key is \\[\\]; expected the name of a unique column", key=[])
    await refused("rows is 7; expected an async function", rows=7)
    await refused("to_event is .*; expected a plain function of a row", to_event=rows)
    await refused("there is no shard 'two'", shard="two")
    async with outbox.transaction("Outer"):
        await refused(r"outbox.bootstrap\(\)", SelfDeadlock)
    assert await outbox.admin.operations() == []


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([{"id": 2}, {"id": 1}], r"the key \(1,\) after \(2,\): select the rows with a key greater than `after`"),
        ([{"id": 1}, {"id": 1}], r"the key \(1,\) after \(1,\)"),
        ([{"id": "a"}, {"id": "a"}], "which must be unique"),
        ([{"id": "a"}, {"id": "b"}, {"id": "a"}], "which must be unique"),
        (None, "rows returned None; expected a list of rows"),
        ([{"name": 1}], r"lacks a column of the key \(id\): KeyError\('id'\)"),
        ([{"id": None}], "rows returned the key None; a key column holds int, str, uuid, decimal"),
        ([{"id": True}], "rows returned the key True"),
        ([{"id": n} for n in range(501)], "rows returned 501 rows instead of 500: add a LIMIT"),
        ([{"id": datetime(2026, 1, 1)}, {"id": datetime(2026, 1, 2, tzinfo=UTC)}], "offset-naive and offset-aware"),
    ],
)
@pytest.mark.above_statements
async def test_rows_outside_the_query_are_refused(outbox: Outbox, look: Look, found: Any, message: str) -> None:
    view_of(outbox)

    async def wrong(tx: Transaction, after: Any, limit: int) -> Any:
        return found

    with pytest.raises(ConfigurationError, match=message):
        await outbox.bootstrap("view", wrong, lambda row: WalletChanged("w", 1, 1), key="id")
    assert await look.fetch("SELECT id FROM {events}") == []


@pytest.mark.above_statements
async def test_rows_that_ignore_the_position_are_refused(outbox: Outbox, look: Look) -> None:
    view_of(outbox)
    await open_wallets(look, 3)

    async def first(tx: Transaction, after: Any, limit: int) -> Any:
        return await rows(tx, None, limit)

    with pytest.raises(ConfigurationError, match=r"the key \('w000',\) after \('w001',\)|which must be unique"):
        await outbox.bootstrap("view", first, to_event, key="id", chunk=2)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (7, InvalidEvent, "7 is not an Event"),
        (Snapshot(7), InvalidEvent, "7 is not an Event"),  # type: ignore[arg-type]  # wrong on purpose
        (MoneyDeposited, InvalidEvent, "is a class; emit an instance"),
        (Other(), ConfigurationError, "an event 'Other', which handler 'view' does not handle; it handles WalletCh"),
        (WalletChanged("w", 1, 1), ConfigurationError, "without a key, and handler 'view' is ordered"),
    ],
)
@pytest.mark.above_statements
async def test_events_that_the_handler_cannot_receive_are_refused(
    outbox: Outbox, look: Look, returned: Any, error: type[Exception], message: str
) -> None:
    view_of(outbox, ordered=True)
    await open_wallets(look, 1)
    key = ["version", "id"] if error is ConfigurationError else "id"

    async def first(tx: Transaction, after: Any, limit: int) -> Any:
        return await rows(tx, None, limit)

    with pytest.raises(error, match=message):
        await outbox.bootstrap("view", first, lambda row: returned, key=key)
    assert await look.fetch("SELECT id FROM {events}") == []
    [operation] = await outbox.admin.operations()
    assert numbers(operation) == ("FAILED", 0, 0, 0)
