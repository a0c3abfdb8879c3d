"""A misspelt name is refused with the nearest known name; every known name is taken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from decimal import Decimal
from uuid import uuid4

import pytest

from outboxio import ConfigurationError, Outbox, UnknownEventType, UnknownHandler, Unprocessable
from outboxio.cli.answer import Exit, exit_code, in_words
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
Order = Callable[[Outbox, str], Awaitable[object]]

LONG_AGO = datetime(2000, 1, 1)

#: Every order that names a handler.
ORDERS: dict[str, Order] = {
    "list": lambda outbox, name: outbox.admin.list(handler=name),
    "list of a state": lambda outbox, name: outbox.admin.list(handler=name, state="DEAD"),
    "resume": lambda outbox, name: outbox.admin.resume(name, "key"),
    "replay": lambda outbox, name: outbox.admin.replay(name, since=LONG_AGO),
    "backfill": lambda outbox, name: outbox.admin.backfill(name, since=LONG_AGO),
    "pause": lambda outbox, name: outbox.admin.pause(name),
    "unpause": lambda outbox, name: outbox.admin.unpause(name),
    "unsubscribe": lambda outbox, name: outbox.admin.unsubscribe(name),
}
every_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


@every_order
async def test_a_name_that_nobody_knows_is_refused_with_the_one_that_was_meant(
    outbox: Outbox, look: Look, order: Order
) -> None:
    outbox.handler(MoneyDeposited, name="to-nats", aliases={"to-kafka"})(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    before = await look.notifications(), await look.fetch("SELECT * FROM {subscriptions}")

    for typed, meant in (("to-natz", "to-nats"), ("to-kafca", "to-kafka"), ("TO-NATS", None)):
        instead = f"did you mean '{meant}'" if meant else "there is 'to-kafka', 'to-nats'"
        with pytest.raises(UnknownHandler, match=f"no handler '{typed}' in namespace 'app': {instead}") as caught:
            await order(outbox, typed)
        assert (caught.value.name, caught.value.namespace) == (typed, "app")

    assert (await look.notifications(), await look.fetch("SELECT * FROM {subscriptions}")) == before
    assert await look.fetch("SELECT * FROM {pauses}") == []


@every_order
async def test_a_name_of_another_namespace_is_not_known(make_outbox: MakeOutbox, order: Order) -> None:
    outbox, stranger = await make_outbox(), await make_outbox("stranger")
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.drain()

    with pytest.raises(UnknownHandler, match="no handler 'first' in namespace 'stranger': there is none at all"):
        await order(stranger, "first")


@every_order
async def test_what_is_registered_or_subscribed_is_known_by_its_name_and_its_aliases(
    make_outbox: MakeOutbox, order: Order
) -> None:
    here, elsewhere, tool = await make_outbox(), await make_outbox(), await make_outbox()
    here.handler(MoneyDeposited, name="here", aliases={"was-here"})(Journal())
    elsewhere.handler(MoneyDeposited, name="elsewhere", aliases={"was-elsewhere"})(Journal())

    for name in ("here", "was-here"):  # registered, and never announced
        await order(here, name)
    for outbox in (here, tool):
        await elsewhere.drain()
        await order(outbox, "was-elsewhere")
        await order(outbox, "elsewhere")  # the last, for one of the orders forgets it


@every_order
async def test_what_is_owed_anything_or_was_paused_is_known_when_its_subscription_is_gone(
    make_outbox: MakeOutbox, order: Order
) -> None:
    outbox, tool = await make_outbox(), await make_outbox()
    outbox.handler(MoneyDeposited, name="owed")(Journal(lambda envelope: ValueError()))
    outbox.handler(WalletOpened, name="paused")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await outbox.admin.pause("paused")
    await outbox.admin.unpause("paused")
    for name in ("owed", "paused"):
        assert await tool.admin.unsubscribe(name) == 1

    for name in ("owed", "paused"):
        await order(tool, name)


async def test_what_is_only_finished_is_found_by_those_orders_that_look_for_it(
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


async def test_a_name_is_known_if_any_of_the_shards_knows_it(
    make_outbox: MakeOutbox, database_url: str, second_url: str
) -> None:
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


async def test_an_event_type_that_nobody_wants_is_refused_with_the_one_that_was_meant(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    says = "no event type 'MoneyDeposted' in namespace 'app': did you mean 'MoneyDeposited'"

    for order in (
        lambda: outbox.admin.list(event_type="MoneyDeposted"),
        lambda: outbox.admin.replay("first", since=LONG_AGO, types=["MoneyDeposted"]),
        lambda: outbox.admin.backfill("first", since=LONG_AGO, types=["MoneyDeposted", MoneyDeposited]),
    ):
        with pytest.raises(UnknownEventType, match=says):
            await order()


async def test_event_types_that_are_known_or_given_as_classes_are_taken(make_outbox: MakeOutbox) -> None:
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


async def test_an_event_type_that_only_rows_have_is_taken(make_outbox: MakeOutbox, clock: MovableClock) -> None:
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


async def test_on_a_topic_may_be_events_of_any_type(make_outbox: MakeOutbox) -> None:
    outbox, tool = await make_outbox(), await make_outbox()
    outbox.handler(name="all-news", topic="news")(Journal())
    await outbox.drain()
    async with outbox.transaction("Emit") as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)), topic="news")

    for one in (outbox, tool):
        assert await one.admin.list(event_type="Whatever") == []
        assert await one.admin.replay("all-news", since=LONG_AGO, types=["Whatever"]) == 0
        assert await one.admin.backfill("all-news", since=LONG_AGO, types=["Whatever"]) == 0


# --- how it is told ------------------------------------------------------------------------------------


def test_a_command_line_tells_it_in_one_line_with_its_own_exit_code() -> None:
    for error in (
        UnknownHandler("to-natz", "shop", {"to-nats", "mail"}),
        UnknownEventType("OrderPlacde", "shop", {"OrderPlaced"}),
    ):
        assert exit_code(error) is Exit.USAGE
        assert in_words(error) == str(error)
        assert "\n" not in str(error)
        assert "did you mean" in str(error)


def test_of_many_known_names_a_few_are_listed() -> None:
    error = UnknownHandler("zzz", "shop", {f"handler-{number:02}" for number in range(40)})
    assert str(error).endswith("'handler-10', 'handler-11' and 28 more")
