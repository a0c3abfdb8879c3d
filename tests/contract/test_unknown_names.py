"""A misspelt name is refused with the nearest known name; every known name is accepted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from decimal import Decimal
from uuid import uuid4

import pytest

from outboxio import ConfigurationError, Outbox, UnknownEventType, UnknownHandler, Unprocessable
from outboxio.cli.output import Exit, error_text, exit_code
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
Operate = Callable[[Outbox, str], Awaitable[object]]

LONG_AGO = datetime(2000, 1, 1)

#: Every operation that names a handler.
OPERATIONS: dict[str, Operate] = {
    "list": lambda outbox, name: outbox.admin.list(handler=name),
    "list of a state": lambda outbox, name: outbox.admin.list(handler=name, state="DEAD"),
    "resume": lambda outbox, name: outbox.admin.resume(name, "key"),
    "replay": lambda outbox, name: outbox.admin.replay(name, since=LONG_AGO),
    "backfill": lambda outbox, name: outbox.admin.backfill(name, since=LONG_AGO),
    "pause": lambda outbox, name: outbox.admin.pause(name),
    "unpause": lambda outbox, name: outbox.admin.unpause(name),
    "unsubscribe": lambda outbox, name: outbox.admin.unsubscribe(name),
}
every_operation = pytest.mark.parametrize("operate", OPERATIONS.values(), ids=OPERATIONS)


@every_operation
async def test_an_unknown_name_is_refused_with_the_likely_one(outbox: Outbox, look: Look, operate: Operate) -> None:
    outbox.handler(MoneyDeposited, name="to-nats", aliases={"to-kafka"})(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    before = await look.notifications(), await look.fetch("SELECT * FROM {subscriptions}")

    for typed, meant in (("to-natz", "to-nats"), ("to-kafca", "to-kafka"), ("TO-NATS", None)):
        instead = f"did you mean '{meant}'" if meant else "known names are 'to-kafka', 'to-nats'"
        with pytest.raises(UnknownHandler, match=f"no handler '{typed}' in namespace 'app': {instead}") as caught:
            await operate(outbox, typed)
        assert (caught.value.name, caught.value.namespace) == (typed, "app")

    assert (await look.notifications(), await look.fetch("SELECT * FROM {subscriptions}")) == before
    assert await look.fetch("SELECT * FROM {pauses}") == []


@every_operation
async def test_a_name_of_another_namespace_is_unknown(make_outbox: MakeOutbox, operate: Operate) -> None:
    outbox, other = await make_outbox(), await make_outbox("other")
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.drain()

    with pytest.raises(UnknownHandler, match="no handler 'first' in namespace 'other': there are none"):
        await operate(other, "first")


@every_operation
async def test_registered_or_subscribed_names_and_aliases_are_known(make_outbox: MakeOutbox, operate: Operate) -> None:
    here, elsewhere, tool = await make_outbox(), await make_outbox(), await make_outbox()
    here.handler(MoneyDeposited, name="here", aliases={"was-here"})(Journal())
    elsewhere.handler(MoneyDeposited, name="elsewhere", aliases={"was-elsewhere"})(Journal())

    for name in ("here", "was-here"):  # registered, and never announced
        await operate(here, name)
    for outbox in (here, tool):
        await elsewhere.drain()
        await operate(outbox, "was-elsewhere")
        await operate(outbox, "elsewhere")  # last, because one of the operations removes it


@every_operation
async def test_names_with_unfinished_rows_or_pauses_stay_known(make_outbox: MakeOutbox, operate: Operate) -> None:
    outbox, tool = await make_outbox(), await make_outbox()
    outbox.handler(MoneyDeposited, name="waiting")(Journal(lambda envelope: ValueError()))
    outbox.handler(WalletOpened, name="paused")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await outbox.admin.pause("paused")
    await outbox.admin.unpause("paused")
    for name in ("waiting", "paused"):
        assert await tool.admin.unsubscribe(name) == 1

    for name in ("waiting", "paused"):
        await operate(tool, name)


async def test_names_with_finished_rows_are_known_where_they_matter(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox, tool = await make_outbox(clock=clock), await make_outbox(clock=clock)
    outbox.handler(MoneyDeposited, name="gone", ordered=True)(Journal(lambda envelope: Unprocessable()))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await tool.admin.unsubscribe("gone")

    assert len(await tool.admin.list(handler="gone")) == 1
    assert await tool.admin.list(handler="gone", state="SUCCEEDED") == []
    assert await tool.admin.replay("gone", since=clock.now() + timedelta(days=1)) == 0
    assert await tool.admin.resume("gone", "1") == 1
    assert await tool.admin.replay("gone", since=LONG_AGO, states={"SKIPPED"}) == 1


async def test_a_name_known_to_any_shard_is_known(make_outbox: MakeOutbox, database_url: str, second_url: str) -> None:
    sharded = await make_outbox(database={"one": database_url, "two": second_url})
    alone = await make_outbox(database=second_url)
    alone.handler(MoneyDeposited, name="second-only")(Journal())
    await alone.drain()

    await sharded.admin.pause("second-only")
    await sharded.admin.unpause("second-only", shard="two")
    with pytest.raises(UnknownHandler):
        await sharded.admin.replay("second-onyl", since=LONG_AGO)
    with pytest.raises(ConfigurationError, match="there is no shard 'three'; the shards are 'one', 'two'"):
        await sharded.admin.pause("second-only", shard="three")


# --- event types ---------------------------------------------------------------------------------------


async def test_an_event_type_without_subscribers_is_refused_with_a_suggestion(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    message = "no event type 'MoneyDeposted' in namespace 'app': did you mean 'MoneyDeposited'"

    for operate in (
        lambda: outbox.admin.list(event_type="MoneyDeposted"),
        lambda: outbox.admin.replay("first", since=LONG_AGO, types=["MoneyDeposted"]),
        lambda: outbox.admin.backfill("first", since=LONG_AGO, types=["MoneyDeposted", MoneyDeposited]),
    ):
        with pytest.raises(UnknownEventType, match=message):
            await operate()


async def test_known_event_types_and_classes_are_accepted(make_outbox: MakeOutbox) -> None:
    outbox, tool = await make_outbox(), await make_outbox()
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    since = datetime(9000, 1, 1)

    for types in (["MoneyDeposited"], [WalletOpened], [MoneyDeposited, WalletOpened], []):
        assert await tool.admin.replay("first", since=since, types=types) == 0  # type: ignore[arg-type]
        assert await tool.admin.backfill("first", since=since, types=types) == 0  # type: ignore[arg-type]
    outbox.register(WalletOpened)
    assert await outbox.admin.list(event_type="WalletOpened") == []
    assert await tool.admin.list(event_type="MoneyDeposited", state="DEAD") == []


async def test_an_event_type_known_from_rows_is_accepted(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, later = await make_outbox(clock=clock), await make_outbox(clock=clock)
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await outbox.admin.unsubscribe("first")
    later.handler(WalletOpened, name="first")(Journal())

    since = clock.now() + timedelta(days=1)
    assert await later.admin.list(event_type="MoneyDeposited", state="DEAD") == []
    assert await later.admin.replay("first", since=since, types=["MoneyDeposited"]) == 0
    with pytest.raises(UnknownEventType):
        await later.admin.replay("first", since=since, types=["MoneyDeposted"])


async def test_a_topic_may_have_events_of_any_type(make_outbox: MakeOutbox) -> None:
    outbox, tool = await make_outbox(), await make_outbox()
    outbox.handler(name="all-news", topic="news")(Journal())
    await outbox.drain()
    async with outbox.transaction("Emit") as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)), topic="news")

    for one in (outbox, tool):
        assert await one.admin.list(event_type="Whatever") == []
        assert await one.admin.replay("all-news", since=LONG_AGO, types=["Whatever"]) == 0
        assert await one.admin.backfill("all-news", since=LONG_AGO, types=["Whatever"]) == 0


# --- error texts ---------------------------------------------------------------------------------------


def test_a_command_prints_one_line_and_its_own_exit_code() -> None:
    for error in (
        UnknownHandler("to-natz", "shop", {"to-nats", "mail"}),
        UnknownEventType("OrderPlacde", "shop", {"OrderPlaced"}),
    ):
        assert exit_code(error) is Exit.USAGE
        assert error_text(error) == str(error)
        assert "\n" not in str(error)
        assert "did you mean" in str(error)


def test_a_few_of_many_known_names_are_listed() -> None:
    error = UnknownHandler("zzz", "shop", {f"handler-{number:02}" for number in range(40)})
    assert str(error).endswith("'handler-10', 'handler-11' and 28 more")
