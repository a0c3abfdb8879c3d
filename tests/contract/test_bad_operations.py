"""Invalid operations get the same errors on every database, and valid ones are accepted everywhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import ConfigurationError, Event, InvalidEvent, Outbox, UnknownHandler
from tests.kit.app import Emit, Journal, Look, MoneyDeposited
from tests.kit.probes import written

SINCE = datetime(2026, 1, 1)

#: Texts that do not fit into a name column, or are not names.
NO_NAMES = ["a" * 256, "a\0b", "\ud800", "", " \n", None, True, 7, 10**5000, b"first", ["first"], object()]


@pytest.mark.above_statements
@pytest.mark.parametrize("name", NO_NAMES, ids=lambda name: ascii(name)[:12] if name != 10**5000 else "huge")
async def test_an_invalid_name_is_refused_by_every_operation(outbox: Outbox, look: Look, name: Any) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    admin = outbox.admin
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: admin.pause(name),
        lambda: admin.unpause(name),
        lambda: admin.unsubscribe(name),
        lambda: admin.resume(name, "key"),
        lambda: admin.replay(name, since=SINCE),
        lambda: admin.backfill(name, since=SINCE),
        lambda: admin.payloads([name]),
        lambda: admin.replay("first", since=SINCE, types=[name]),
        lambda: admin.backfill("first", since=SINCE, types=[name]),
    ]
    if name is not None:
        calls += [lambda: admin.list(handler=name), lambda: admin.list(event_type=name)]
        calls += [lambda: admin.partitions(name), lambda: admin.partitions(name, 1)]
    for call in calls:
        with pytest.raises(ConfigurationError, match=r"^(handler|event type): ") as caught:
            await call()
        assert not isinstance(caught.value, UnknownHandler)
    assert await look.fetch("SELECT * FROM {pauses}") == []


@pytest.mark.above_statements
async def test_an_invalid_list_is_refused_with_an_example(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    admin, one = outbox.admin, uuid4()
    calls: list[tuple[Callable[[], Awaitable[object]], str]] = [
        (lambda: admin.retry(one), r"^ids is UUID\(.*\); expected a list of them, as in retry\(\[id\]\)"),
        (lambda: admin.skip(str(one)), r"^ids is '.*'; expected a list of them, as in skip\(\[id\]\)"),
        (lambda: admin.retry(None), r"^ids is None; expected a list"),
        (lambda: admin.retry([one, "x"]), r"^'x' is not the id of a notification or an event; expected a UUID"),
        (lambda: admin.skip([7]), r"^7 is not the id"),
        (lambda: admin.inspect(None), r"^None is not the id"),
        (lambda: admin.replay("first", SINCE, types="MoneyDeposited"), r"^types is 'MoneyDeposited'; expected a list"),
        (lambda: admin.replay("first", SINCE, types=MoneyDeposited), r"^types is <class .*MoneyDeposited'>; expected"),
        (lambda: admin.backfill("first", SINCE, types=7), r"^types is 7; expected a list"),
        (lambda: admin.replay("first", SINCE, states="DEAD"), r"^states is 'DEAD'; expected a list of them"),
        (lambda: admin.replay("first", SINCE, states=["DAED"]), r"^there is no state 'DAED'; the states are PENDING"),
        (lambda: admin.list(state=["DEAD"]), r"^there is no state \['DEAD'\]"),
    ]  # type: ignore[arg-type, list-item]  # callers may not be typed
    for call, message in calls:
        with pytest.raises(ConfigurationError, match=message):
            await call()


@pytest.mark.above_statements
@pytest.mark.parametrize(
    "limit",
    [0, -1, True, None, 1.5, "10", 2**63, 10**5000],
    ids=lambda limit: ascii(limit)[:9] if limit != 10**5000 else "huge",
)
async def test_a_limit_is_an_integer_that_every_database_accepts(outbox: Outbox, limit: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^limit is .*; expected a whole number, 1 or more"):
        await outbox.admin.list(limit=limit)


@pytest.mark.above_statements
@pytest.mark.parametrize("shard", ["", "other", 7, True, ["default"], b"default"], ids=ascii)
async def test_a_shard_must_exist(outbox: Outbox, look: Look, shard: Any) -> None:
    message = r"there is no shard .*; the shards are 'default'"
    for call in (
        lambda: outbox.admin.counts(shard=shard),
        lambda: outbox.admin.retry([], shard=shard),
        lambda: outbox.executor.execute(Emit((1,)), shard=shard),
        lambda: outbox.inbox.receive(source="s", external_id="1", type="T", payload={}, shard=shard),
    ):
        with pytest.raises(ConfigurationError, match=message):
            await call()
    assert await written(look) == []


@pytest.mark.above_statements
@pytest.mark.parametrize(
    "key",
    [None, b"k", "\0", "k" * 256, "\ud800", 10**5000],
    ids=lambda key: ascii(key)[:9] if key != 10**5000 else "huge",
)
async def test_a_key_that_no_row_can_have_is_refused(outbox: Outbox, key: Any) -> None:
    outbox.handler(MoneyDeposited, name="first", ordered=True)(Journal())
    with pytest.raises(ConfigurationError, match="ordering_key"):
        await outbox.admin.resume("first", key)


async def test_numbers_that_cannot_be_written_as_text_are_refused_by_column(outbox: Outbox, look: Look) -> None:
    for column in ("model_id", "ordering_key"):
        async with outbox.transaction("Huge") as tx:
            with pytest.raises(InvalidEvent, match=rf"^{column} of event MoneyDeposited: an integer of 16610 bits"):
                tx.emit(MoneyDeposited(uuid4(), Decimal(1)), **{column: 10**5000})
    assert [row["event_type"] for row in await written(look)] == [None, None]


async def test_the_longest_names_and_largest_numbers_are_accepted_everywhere(outbox: Outbox) -> None:
    names = [
        "x" * 255,
        "ß" * 255,
        "😀" * 255,
        "'; DROP TABLE x; --",
        "a%sb%%",
        "ends with a space ",
        "\t",
        "{}",
        "$1 ? :a",
    ]
    names = [name for name in names if name.strip()]

    for number, name in enumerate(names):

        class Named(Event, type_name=name):
            pass

        outbox.handler(Named, name=name, ordered=True)(Journal())
        async with outbox.transaction("Emit") as tx:
            tx.emit(Named(), model_id=2**200 + number, ordering_key=name)
    await outbox.drain()

    for name in names:
        [record] = await outbox.admin.list(handler=name, event_type=name, limit=2**63 - 1)
        assert (record.handler_name, record.ordering_key, record.state) == (name, name, "SUCCEEDED")
        assert await outbox.admin.replay(name, since=SINCE, types=[name]) == 1
        await outbox.admin.pause(name)
        assert await outbox.admin.unpause(name)
        assert await outbox.admin.resume(name, name) == 0
        assert await outbox.admin.backfill(name, since=SINCE, types=[name]) == 0
        assert await outbox.admin.payloads([name]) == ["{}"]
        assert await outbox.admin.unsubscribe(name) == 1
    assert (await outbox.admin.counts())["PENDING"] == len(names)
