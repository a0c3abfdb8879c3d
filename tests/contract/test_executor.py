"""An execution is a single transaction: rows and events are committed together, and each row has the whole context."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID, uuid4

import pytest
from msgspec import Struct

from outboxio import (
    Action,
    ConfigurationError,
    Event,
    EventEnvelope,
    InvalidEvent,
    NestedExecute,
    Outbox,
    Settings,
    Transaction,
)
from outboxio.testing import MovableClock, emitted, expect_event
from tests.kit.app import Deposit, Emit, Look, MoneyDeposited, OpenWallet, WalletOpened, opened
from tests.kit.marks import needs_asyncpg
from tests.kit.probes import MakeOutbox, add_wallet, balances, doing, written
from tests.kit.sql import sql

pytestmark = [pytest.mark.every_version, pytest.mark.with_tables]

NOON = datetime(2030, 1, 1, 12)


class Colour(Enum):
    RED = "red"


class Part(Struct, frozen=True):
    weight: float
    names: tuple[str, ...]


class Everything(Event):
    id: UUID
    amount: Decimal
    at: datetime
    colour: Colour
    blob: bytes
    part: Part
    by_name: dict[str, Part | None]
    text: str
    number: int


class InsufficientFunds(Exception):
    pass


class Transfer(Action):
    """Moves money from one wallet to another, and detects only late that there was not enough."""

    source: str
    target: str
    amount: int

    async def perform(self, tx: Transaction) -> int:
        await tx.execute(sql(tx, "UPDATE wallets SET balance = balance + $1 WHERE id = $2"), self.amount, self.target)
        await tx.execute(sql(tx, "UPDATE wallets SET balance = balance - $1 WHERE id = $2"), self.amount, self.source)
        tx.emit(MoneyDeposited(uuid4(), Decimal(self.amount)), model_id=self.target, model_type="Wallet")
        left = await tx.fetchval(sql(tx, "SELECT balance FROM wallets WHERE id = $1"), self.source)
        if left < 0:
            raise InsufficientFunds(self.source)
        return int(left)


# --- atomicity ---------------------------------------------------------------------------------


async def test_application_rows_and_events_are_committed_together(outbox: Outbox, look: Look) -> None:
    wallet_id = uuid4()

    assert await outbox.executor.execute(OpenWallet(wallet_id)) == wallet_id

    assert await balances(look) == [0]
    assert [row["event_type"] for row in await written(look)] == ["WalletOpened"]


async def test_nothing_is_visible_outside_before_the_commit(outbox: Outbox, look: Look) -> None:
    async def read_from_outside(tx: Transaction) -> None:
        await add_wallet(tx)
        tx.emit(WalletOpened(uuid4()))
        assert await balances(look) == []
        assert await written(look) == []
        assert await tx.fetchval("SELECT count(*) FROM wallets") == 1

    await outbox.executor.execute(doing(read_from_outside))


async def test_a_refused_transfer_writes_nothing(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction("Setup") as tx:
        await add_wallet(tx, "ada", 10)
        await add_wallet(tx, "bob", 0)
    before = await written(look)

    with pytest.raises(InsufficientFunds):
        await outbox.executor.execute(Transfer("ada", "bob", 11))

    assert await balances(look) == [10, 0]
    assert await written(look) == before
    assert await outbox.executor.execute(Transfer("ada", "bob", 10)) == 0
    assert await balances(look) == [0, 10]


async def test_exceptions_of_perform_pass_through_unchanged(outbox: Outbox, look: Look) -> None:
    error = InsufficientFunds("ada")

    async def fail(tx: Transaction) -> None:
        await add_wallet(tx)
        tx.emit(WalletOpened(uuid4()))
        raise error

    with pytest.raises(InsufficientFunds) as caught:
        await outbox.executor.execute(doing(fail))
    assert caught.value is error
    assert (error.__cause__, error.__context__) == (None, None)

    with pytest.raises(InsufficientFunds) as caught:
        async with outbox.transaction("Block") as tx:
            await fail(tx)
    assert caught.value is error
    assert await balances(look) == []
    assert await written(look) == []


async def test_a_base_exception_rolls_back_too(outbox: Outbox, look: Look) -> None:
    class Stop(BaseException):
        pass

    async def stop(tx: Transaction) -> None:
        await add_wallet(tx)
        raise Stop

    with pytest.raises(Stop):
        await outbox.executor.execute(doing(stop))
    assert await balances(look) == []


@needs_asyncpg
async def test_a_failed_statement_raises_the_drivers_error(outbox: Outbox, look: Look) -> None:
    async def twice(tx: Transaction) -> None:
        await add_wallet(tx)
        await add_wallet(tx)

    with pytest.raises(Exception, match=r"(?i)unique|duplicate") as caught:
        await outbox.executor.execute(doing(twice))

    assert type(caught.value).__module__.partition(".")[0] in ("asyncpg", "pymysql", "asyncmy", "sqlite3")
    assert await balances(look) == []


async def test_a_failed_action_does_not_disturb_the_next(outbox: Outbox, look: Look) -> None:
    async def fail(tx: Transaction) -> None:
        await tx.execute("SELECT * FROM no_such_table")

    for _ in range(25):  # more than a pool holds
        with pytest.raises(Exception, match="no_such_table"):
            await outbox.executor.execute(doing(fail))
    await outbox.executor.execute(OpenWallet(uuid4()))
    assert await balances(look) == [0]


async def test_concurrent_executions_all_commit(outbox: Outbox, look: Look) -> None:
    wallet_id = uuid4()
    await outbox.executor.execute(OpenWallet(wallet_id))

    seen = await asyncio.gather(*(outbox.executor.execute(Deposit(wallet_id, Decimal(1))) for _ in range(50)))

    assert sorted(seen) == list(range(1, 51))
    assert len(await emitted(outbox, MoneyDeposited)) == 50
    assert len({row["action_id"] for row in await written(look)}) == 51


# --- the columns of a row ------------------------------------------------------------------------


async def test_each_row_has_the_whole_context_of_its_action(outbox: Outbox, look: Look, clock: MovableClock) -> None:
    wallet_id, other = uuid4(), uuid4()

    class Work(Action):
        wallet_id: UUID
        note: str

        async def perform(self, tx: Transaction) -> UUID:
            tx.emit(
                WalletOpened(wallet_id),
                model_id=wallet_id,
                model_type="Wallet",
                ordering_key="customer 7",
                topic="wallets",
                available_at=NOON + timedelta(hours=1),
            )
            clock.advance("2s")
            tx.emit(MoneyDeposited(other, Decimal("1.50")), model_id=7)
            return tx.action_id

    action_id = await outbox.executor.execute(
        Work(wallet_id, "Grüße, 世界"), correlation_id="req-7", headers={"traceparent": "00-ab", "tenant": {"id": 1}}
    )

    first, second = await written(look)
    shared = {
        "namespace": "app",
        "action_id": action_id,
        "action_name": "Work",
        "action_params": {"wallet_id": str(wallet_id), "note": "Grüße, 世界"},
        "started_date": NOON,
        "completion_date": NOON + timedelta(seconds=2),
        "event_date": NOON + timedelta(seconds=2),
        "delivered": False,
        "source": None,
        "correlation_id": "req-7",
        "causation_id": None,
        "headers": {"traceparent": "00-ab", "tenant": {"id": 1}},
        "hops": 0,
    }
    assert first == shared | {
        "id": first["id"],
        "sequence": first["sequence"],
        "event_type": "WalletOpened",
        "payload": {"wallet_id": str(wallet_id)},
        "model_id": str(wallet_id),
        "model_type": "Wallet",
        "ordering_key": "customer 7",
        "topic": "wallets",
        "available_at": NOON + timedelta(hours=1),
    }
    assert second == shared | {
        "id": second["id"],
        "sequence": second["sequence"],
        "event_type": "MoneyDeposited",
        "payload": {"wallet_id": str(other), "amount": "1.50"},
        "model_id": "7",
        "model_type": None,
        "ordering_key": None,
        "topic": None,
        "available_at": None,
    }


async def test_an_action_emits_events_of_several_types(outbox: Outbox, look: Look) -> None:
    async def several(tx: Transaction) -> None:
        tx.emit(WalletOpened(uuid4()))
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)))
        tx.emit(WalletOpened(uuid4()))

    await outbox.executor.execute(doing(several))

    rows = await written(look)
    assert [row["event_type"] for row in rows] == ["WalletOpened", "MoneyDeposited", "WalletOpened"]
    assert len({row["action_id"] for row in rows}) == 1


async def test_every_execution_has_its_own_action_id(outbox: Outbox, look: Look) -> None:
    action = Emit((1, 2))
    await outbox.executor.execute(action)
    await outbox.executor.execute(action)

    ids = [row["action_id"] for row in await written(look)]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert {i.version for i in ids} == {7}


async def test_rows_are_numbered_and_ids_sort_in_emission_order(outbox: Outbox, look: Look) -> None:
    await outbox.executor.execute(Emit(tuple(range(20))))
    await outbox.executor.execute(Emit(tuple(range(20, 40))))

    rows = await written(look)
    assert [row["model_id"] for row in rows] == [str(n) for n in range(40)]
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    assert {row["id"].version for row in rows} == {7}
    assert [row["sequence"] for row in rows] == sorted({row["sequence"] for row in rows})


async def test_dates_are_naive_utc_with_microseconds_of_the_outboxs_clock(make_outbox: MakeOutbox, look: Look) -> None:
    times = iter([datetime(2030, 1, 1, 14, 0, 0, 1, timezone(timedelta(hours=2))), datetime(2030, 1, 1, 12, 0, 1, 2)])
    outbox = await make_outbox(clock=lambda: next(times))

    async def note(tx: Transaction) -> None:
        assert tx.now == datetime(2030, 1, 1, 12, 0, 0, 1)
        tx.emit(WalletOpened(uuid4()), available_at=datetime(2030, 1, 2, 1, tzinfo=timezone(timedelta(hours=3))))

    await outbox.executor.execute(doing(note))

    (row,) = await written(look)
    assert row["started_date"] == datetime(2030, 1, 1, 12, 0, 0, 1)
    assert row["completion_date"] == row["event_date"] == datetime(2030, 1, 1, 12, 0, 1, 2)
    assert row["available_at"] == datetime(2030, 1, 1, 22)


async def test_without_a_clock_rows_have_the_current_time(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox()
    before = datetime.now(UTC).replace(tzinfo=None)
    await outbox.executor.execute(Emit((1,)))
    (row,) = await written(look)
    # Generous: a server's clock may differ from ours.
    assert abs(row["started_date"] - before) < timedelta(minutes=10)
    assert timedelta(0) <= row["completion_date"] - row["started_date"] < timedelta(minutes=1)


async def test_an_action_without_events_leaves_one_sentinel_row(outbox: Outbox, look: Look) -> None:
    wallet = UUID(int=5)

    class Quiet(Action):
        wallet_id: UUID

        async def perform(self, tx: Transaction) -> None:
            await add_wallet(tx)

    await outbox.executor.execute(Quiet(wallet), correlation_id="c")

    (row,) = await written(look)
    assert (row["model_id"], row["model_type"], row["event_type"], row["payload"]) == (None, None, None, None)
    assert (row["action_name"], row["action_params"]) == ("Quiet", {"wallet_id": str(wallet)})
    assert (row["event_date"], row["delivered"], row["correlation_id"]) == (NOON, False, "c")


async def test_sentinel_rows_can_be_disabled(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(record_empty_actions=False))
    await look.fetch("CREATE TABLE own (id INT)")
    async with outbox.transaction("Fill") as tx:
        await tx.execute("INSERT INTO own VALUES (1)")
    await outbox.executor.execute(Emit((1,)))

    assert await look.value("SELECT count(*) FROM own") == 1
    assert [row["action_name"] for row in await written(look)] == ["Emit"]


async def test_values_are_stored_as_msgspec_encodes_them_and_read_back(outbox: Outbox, look: Look) -> None:
    event = Everything(
        UUID(int=1), Decimal("1.10"), NOON, Colour.RED, b"\x00\xff", Part(0.1, ("a", "b")),
        {"x": None, "é": Part(1, ())}, 'quotes " and \\ and \\u0000 and emoji 😀', 2**62,
    )  # fmt: skip
    async with outbox.transaction("Store") as tx:
        tx.emit(event)

    assert await emitted(outbox, Everything) == [event]
    (row,) = await written(look)
    assert row["payload"]["amount"] == "1.10"
    assert row["payload"]["colour"] == "red"
    assert row["payload"]["at"] == "2030-01-01T12:00:00"


async def test_type_name_replaces_the_stored_class_name(outbox: Outbox, look: Look) -> None:
    class RenamedEvent(Event, type_name="OldEvent"):
        pass

    class RenamedAction(Action, type_name="OldAction"):
        async def perform(self, tx: Transaction) -> None:
            tx.emit(RenamedEvent())

    await outbox.executor.execute(RenamedAction())

    (row,) = await written(look)
    assert (row["action_name"], row["event_type"], row["payload"]) == ("OldAction", "OldEvent", {})


async def test_the_namespace_is_on_every_row(make_outbox: MakeOutbox, look: Look) -> None:
    for namespace in ("wallets", "crm"):
        await (await make_outbox(namespace)).executor.execute(Emit((1, 2)))
    assert [row["namespace"] for row in await written(look)] == ["wallets", "wallets", "crm", "crm"]


async def test_all_events_of_an_action_are_found_by_its_id(outbox: Outbox, look: Look) -> None:
    async def three(tx: Transaction) -> UUID:
        for _ in range(3):
            tx.emit(WalletOpened(uuid4()))
        return tx.action_id

    await outbox.executor.execute(Emit((1,)))
    action_id = await outbox.executor.execute(doing(three))
    assert await look.value("SELECT count(*) FROM {events} WHERE action_id = $1", look.id(action_id)) == 3


# --- what an action can use ------------------------------------------------------------------------


async def test_tx_provides_its_resources_action_and_shard(make_outbox: MakeOutbox) -> None:
    resources = object()
    outbox = await make_outbox(resources=resources, clock=lambda: NOON)

    async def look_at(tx: Transaction) -> Transaction:
        assert tx.resources is resources
        assert tx.action_id.version == 7
        assert (tx.action_name, tx.shard, tx.now, tx.is_closed) == ("Scripted", "default", NOON, False)
        return tx

    assert (await outbox.executor.execute(doing(look_at))).is_closed


async def test_perform_sees_its_own_parameters(outbox: Outbox) -> None:
    class Add(Action):
        left: int
        right: int = 2

        async def perform(self, tx: Transaction) -> int:
            return self.left + self.right

    assert await outbox.executor.execute(Add(1)) == 3


async def test_only_an_action_can_be_executed(outbox: Outbox, look: Look) -> None:
    with pytest.raises(InvalidEvent, match=r"'deposit' is not an Action; define its class as `class X\(Action\)`"):
        await outbox.executor.execute("deposit")  # type: ignore[arg-type]
    with pytest.raises(InvalidEvent, match="is not an Action"):
        await outbox.executor.execute(Emit)  # type: ignore[arg-type]
    assert await written(look) == []


async def test_an_action_without_an_async_perform_is_refused(outbox: Outbox, look: Look) -> None:
    class Unfinished(Action):
        pass

    class Blocking(Action):
        def perform(self, tx: Transaction) -> int:  # type: ignore[override]
            return 1

    with pytest.raises(TypeError, match="Unfinished has no perform method"):
        await outbox.executor.execute(Unfinished())
    with pytest.raises(TypeError, match="perform of Blocking is not an async method: write `async def perform"):
        await outbox.executor.execute(Blocking())
    assert await written(look) == []


# --- outbox.transaction ------------------------------------------------------------------------------


async def test_a_transaction_block_is_an_action(outbox: Outbox, look: Look) -> None:
    class Params(Struct):
        reason: str

    async with outbox.transaction("CloseWallet", Params("fraud"), correlation_id="c-1", headers={"user": "ada"}) as tx:
        await add_wallet(tx)
        tx.emit(WalletOpened(UUID(int=1)))
        assert tx.action_name == "CloseWallet"
    async with outbox.transaction("Mapping", {"wallet_id": UUID(int=1)}) as second:
        pass

    closed, mapped = await written(look)
    assert await balances(look) == [0]
    assert (closed["action_id"], closed["action_name"], closed["action_params"]) == (
        tx.action_id, "CloseWallet", {"reason": "fraud"}
    )  # fmt: skip
    assert (closed["correlation_id"], closed["headers"]) == ("c-1", {"user": "ada"})
    assert (mapped["action_id"], mapped["action_params"]) == (second.action_id, {"wallet_id": str(UUID(int=1))})
    assert (mapped["correlation_id"], mapped["headers"]) == (None, None)


async def test_a_transaction_block_may_be_left_early(outbox: Outbox, look: Look) -> None:
    async def leaves() -> str:
        async with outbox.transaction("Early") as tx:
            await add_wallet(tx)
            return "left"

    assert await leaves() == "left"
    assert await balances(look) == [0]


# --- shards --------------------------------------------------------------------------------------------


async def test_an_action_runs_on_the_named_or_the_first_shard(database_url: str, second_url: str) -> None:
    async with opened(Outbox({"first": database_url, "second": second_url}, namespace="app")) as outbox:

        async def where(tx: Transaction) -> str:
            tx.emit(WalletOpened(uuid4()), model_id=tx.shard)
            return tx.shard

        assert await outbox.executor.execute(doing(where)) == "first"
        assert await outbox.executor.execute(doing(where), shard="second") == "second"
        async with outbox.transaction("Block", shard="second") as tx:
            assert tx.shard == "second"
        assert [row["model_id"] for row in await written(Look(database_url))] == ["first"]
        assert [row["model_id"] for row in await written(Look(second_url))] == ["second", None]


async def test_a_failure_on_one_shard_does_not_affect_another(database_url: str, second_url: str) -> None:
    async with opened(Outbox({"first": database_url, "second": second_url}, namespace="app")) as outbox:

        async def fail(tx: Transaction) -> None:
            tx.emit(WalletOpened(uuid4()))
            raise InsufficientFunds

        with pytest.raises(InsufficientFunds):
            await outbox.executor.execute(doing(fail), shard="second")
        await outbox.executor.execute(Emit((1,)), shard="first")
        assert len(await written(Look(database_url))) == 1
        assert await written(Look(second_url)) == []


async def test_an_unknown_shard_is_refused_by_name(outbox: Outbox, look: Look) -> None:
    with pytest.raises(ConfigurationError, match="there is no shard 'mars'; the shards are 'default'"):
        await outbox.executor.execute(Emit((1,)), shard="mars")
    with pytest.raises(ConfigurationError, match="there is no shard 'mars'"):
        async with outbox.transaction("X", shard="mars"):
            pass
    assert await written(look) == []


# --- nested actions ------------------------------------------------------------------------------------


async def test_execute_inside_perform_is_refused_with_advice(outbox: Outbox, look: Look) -> None:
    async def nest(tx: Transaction) -> None:
        await add_wallet(tx)
        await outbox.executor.execute(Emit((1,)))

    with pytest.raises(NestedExecute, match=r"execute\(Emit\) inside the transaction of Scripted.*let a handler"):
        await outbox.executor.execute(doing(nest))
    assert await balances(look) == []
    assert await written(look) == []


async def test_execute_inside_perform_is_refused_from_a_child_task_too(outbox: Outbox, look: Look) -> None:
    async def nest(tx: Transaction) -> None:
        with pytest.raises(NestedExecute):
            await asyncio.gather(outbox.executor.execute(Emit((1,))))
        with pytest.raises(NestedExecute):
            async with outbox.transaction("Inner"):
                pass
        tx.emit(WalletOpened(uuid4()))

    await outbox.executor.execute(doing(nest))
    assert [row["event_type"] for row in await written(look)] == ["WalletOpened"]


async def test_a_task_started_by_perform_may_execute_after_the_action(outbox: Outbox, look: Look) -> None:
    committed = asyncio.Event()

    async def later() -> None:
        await committed.wait()
        await outbox.executor.execute(Emit((1,)))

    async def start(tx: Transaction) -> asyncio.Task[None]:
        return asyncio.create_task(later())

    task = await outbox.executor.execute(doing(start))
    committed.set()
    await task
    assert [row["action_name"] for row in await written(look)] == ["Scripted", "Emit"]


async def test_one_action_after_another_is_not_nested(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction("First"):
        pass
    await outbox.executor.execute(Emit((1,)))
    with pytest.raises(InsufficientFunds):
        async with outbox.transaction("Failed"):
            raise InsufficientFunds
    await outbox.executor.execute(Emit((2,)))
    assert [row["action_name"] for row in await written(look)] == ["First", "Emit", "Emit"]


# --- chains ----------------------------------------------------------------------------------------------


async def test_an_action_executed_by_a_handler_is_caused_by_its_event(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="chains")
    async def chains(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await envelope.execute(OpenWallet(envelope.event.wallet_id))
        await outbox.executor.execute(OpenWallet(uuid4()), correlation_id="its own")
        async with outbox.transaction("Block") as tx:
            tx.emit(WalletOpened(uuid4()))

    await outbox.executor.execute(Emit((1,)), correlation_id="req-7")
    assert (await outbox.drain()).succeeded == 1

    cause, *caused = await written(look)
    assert [row["action_name"] for row in caused] == ["OpenWallet", "OpenWallet", "Block"]
    assert {row["causation_id"] for row in caused} == {cause["id"]}
    assert [row["correlation_id"] for row in caused] == ["req-7", "its own", "req-7"]
    assert {row["hops"] for row in caused} == {1}
    assert len({row["action_id"] for row in [cause, *caused]}) == 4


async def test_actions_executed_outside_handlers_have_no_cause(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="quiet")
    async def quiet(envelope: EventEnvelope[Any]) -> None:
        pass

    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await outbox.executor.execute(OpenWallet(uuid4()))
    assert {row["causation_id"] for row in await written(look)} == {None}
    await expect_event(outbox, WalletOpened)
