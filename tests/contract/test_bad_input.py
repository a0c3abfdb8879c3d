"""Invalid input is refused at once, with the value and a fix; no row is written."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Awaitable, Callable
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest
from msgspec import Struct

from outboxio import (
    Action,
    AmbiguousTypeName,
    ConfigurationError,
    DatabaseUnavailable,
    Event,
    EventEnvelope,
    EventHandler,
    InvalidEvent,
    Outbox,
    OutboxError,
    PoolTooSmall,
    RegistrationError,
    RetryPolicy,
    SameDatabase,
    SchemaMissing,
    Settings,
    SettingsError,
    Shard,
    Transaction,
)
from outboxio.testing import emitted
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened
from tests.kit.probes import add_wallet, balances, doing, open_transactions, written
from tests.kit.server_actions import actions_on, with_password

pytestmark = pytest.mark.with_tables

LONG = "x" * 300


class Anything(Event):
    value: Any


class Row(Event, array_like=True):
    wallet: str


class NoEvent(Struct, frozen=True):
    wallet: str


class Colour(Enum):
    NUL = "re\0d"


class Holder(Struct, frozen=True):
    inner: Any


async def nothing(envelope: EventEnvelope[Any]) -> None:
    pass


async def refused(outbox: Outbox, look: Look, emit: Callable[[Transaction], None], message: str) -> None:
    """Check that ``emit`` is refused and that the action fails with the error, leaving neither rows nor events."""

    async def run(tx: Transaction) -> None:
        await add_wallet(tx)
        tx.emit(WalletOpened(uuid4()))
        emit(tx)

    with pytest.raises(InvalidEvent, match=message):
        await outbox.executor.execute(doing(run))
    assert await balances(look) == []
    assert await written(look) == []


def stores_nul(outbox: Outbox) -> bool:
    return outbox.executor.shard(None).database.stores_nul


# --- events and their attributes ---------------------------------------------------------------------


@pytest.mark.above_statements
async def test_an_event_that_is_not_a_json_object_is_refused(outbox: Outbox, look: Look) -> None:
    refusals: list[tuple[Any, str]] = [
        (Row("w1"), r'^event Row: encodes to \["w1"\], which is not a JSON object$'),
        (NoEvent("w1"), r"^emit: NoEvent\(wallet='w1'\) is not an Event; define its class as `class X\(Event\)`$"),
        ({"wallet": "w1"}, r"is not an Event"),
        (None, r"^emit: None is not an Event"),
        (WalletOpened, r"WalletOpened is a class; emit an instance, as in `WalletOpened\(...\)`"),
        (Anything(object()), r"^event Anything: cannot be encoded as JSON: Encoding objects of type object"),
        (Anything({(1, 2): 3}), r"^event Anything: cannot be encoded as JSON: .*keys"),
    ]
    for event, message in refusals:
        await refused(outbox, look, lambda tx, event=event: tx.emit(event), message)


@pytest.mark.above_statements
async def test_an_event_that_contains_itself_is_refused(outbox: Outbox, look: Look) -> None:
    circle: list[Any] = []
    circle.append(circle)
    await refused(outbox, look, lambda tx: tx.emit(Anything(circle)), "event Anything: cannot be encoded as JSON")


@pytest.mark.above_statements
async def test_nan_and_infinities_are_refused_at_any_depth(outbox: Outbox, look: Look) -> None:
    """msgspec would silently write such numbers as null."""
    hidden = {
        "value": math.nan,
        "value.inner": Holder(math.inf),
        "value[1]": [None, -math.inf],
        "value.a[0].b": {"a": ({"b": math.nan},)},
        "value[0]": {math.nan},
    }
    for path, value in hidden.items():
        where = path.replace("[", r"\[").replace("]", r"\]")
        expected = rf"^event Anything: {where} is (nan|inf|-inf), which JSON cannot hold; use None, or a string"
        await refused(outbox, look, lambda tx, value=value: tx.emit(Anything(value)), expected)
    # A real null is allowed.
    async with outbox.transaction("Fine") as tx:
        tx.emit(Anything({"a": None, "b": [1.5]}))
    assert len(await written(look)) == 1


async def test_nul_is_refused_by_its_path_or_stored_unchanged(outbox: Outbox, look: Look) -> None:
    hidden: dict[str, Any] = {
        "value": "a\0b",
        "value.inner": Holder("\0"),
        "value[1].k": ["x", {"k": "\0"}],
        "value key": {"k\0": 1},
    }
    for path, value in hidden.items():
        if stores_nul(outbox):
            async with outbox.transaction("Nul") as tx:
                tx.emit(Anything(value))
        else:
            where = path.replace("[", r"\[").replace("]", r"\]")
            expected = rf"^event Anything: {where} '.*x00.*' contains NUL \(U\+0000\), which this database cannot store"
            await refused(outbox, look, lambda tx, value=value: tx.emit(Anything(value)), expected)
    if stores_nul(outbox):
        assert [event.value for event in await emitted(outbox, Anything)] == [
            "a\0b",
            {"inner": "\0"},
            ["x", {"k": "\0"}],
            {"k\0": 1},
        ]


async def test_text_that_only_looks_like_nul_is_stored(outbox: Outbox) -> None:
    for value in ("\\u0000", "\\\\u0000", "\u0001", "\N{SYMBOL FOR NULL}"):
        async with outbox.transaction("LooksLikeNul") as tx:
            tx.emit(Anything(value))
    assert [event.value for event in await emitted(outbox, Anything)] == [
        "\\u0000", "\\\\u0000", "\u0001", "\N{SYMBOL FOR NULL}"
    ]  # fmt: skip


@pytest.mark.not_on("mysql", "mariadb", "sqlite", why="only PostgreSQL cannot store NUL")
async def test_nul_in_an_enum_or_a_third_party_class_is_found(outbox: Outbox, look: Look) -> None:
    await refused(outbox, look, lambda tx: tx.emit(Anything(Colour.NUL)), r"value '.*x00.*' contains NUL")


async def test_lone_surrogates_are_refused(outbox: Outbox, look: Look) -> None:
    lone = "\ud800"
    expected = "contains a lone surrogate, which is not valid Unicode"
    await refused(outbox, look, lambda tx: tx.emit(Anything([lone])), rf"^event Anything: a string {expected}")
    await refused(outbox, look, lambda tx: tx.emit(Anything({lone: 1})), expected)
    for field in ("model_id", "model_type", "ordering_key", "topic"):
        await refused(
            outbox,
            look,
            lambda tx, field=field: tx.emit(Anything(1), **{field: lone}),
            rf"^{field} of event Anything: .*{expected}",
        )
    with pytest.raises(InvalidEvent, match=f"correlation_id of Emit: .*{expected}"):
        await outbox.executor.execute(Emit((1,)), correlation_id=lone)
    for options in ({"params": {"a": lone}}, {"headers": {"a": lone}}):
        with pytest.raises(InvalidEvent, match=f" of Block: a string {expected}"):
            async with outbox.transaction("Block", **options):  # type: ignore[arg-type]
                pass
    assert await written(look) == []


async def test_values_that_do_not_fit_their_column_are_refused_by_name(outbox: Outbox, look: Look) -> None:
    for field in ("model_id", "model_type", "ordering_key", "topic"):
        expected = rf"^{field} of event Anything: 'x+'\.\.\. has 300 characters; the column holds 255"
        await refused(outbox, look, lambda tx, field=field: tx.emit(Anything(1), **{field: LONG}), expected)
        expected = rf"^{field} of event Anything: 'a\\x00b' contains NUL \(U\+0000\), which text columns cannot store"
        await refused(outbox, look, lambda tx, field=field: tx.emit(Anything(1), **{field: "a\0b"}), expected)


async def test_any_255_characters_are_stored(outbox: Outbox, look: Look) -> None:
    for text in ("x" * 255, "ß" * 255, "😀" * 255):
        async with outbox.transaction(text, correlation_id=text) as tx:
            tx.emit(Anything(1), model_id=text, model_type=text, ordering_key=text, topic=text)
        row = (await written(look))[-1]
        columns = ("action_name", "correlation_id", "model_id", "model_type", "ordering_key", "topic")
        assert {row[column] for column in columns} == {text}


async def test_available_at_must_be_a_timestamp(outbox: Outbox, look: Look) -> None:
    for value in ("2030-01-01", 1893456000, datetime(2030, 1, 1).date()):
        expected = r"^available_at of event Anything: .* is not a datetime"
        await refused(outbox, look, lambda tx, value=value: tx.emit(Anything(1), available_at=value), expected)


# --- actions and their attributes --------------------------------------------------------------------------


async def test_parameters_that_cannot_be_stored_are_refused_first(outbox: Outbox, look: Look) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"params": [1]}, r"^params of Block: encodes to \[1\], which is not a JSON object"),
        ({"params": 7}, r"^params of Block: encodes to 7, which is not a JSON object"),
        ({"params": "text"}, r'^params of Block: encodes to "text", which is not a JSON object'),
        ({"params": {"rate": math.nan}}, r"^params of Block: rate is nan, which JSON cannot hold"),
        ({"params": {"x": object()}}, r"^params of Block: cannot be encoded as JSON"),
        ({"headers": ["a"]}, r"^headers of Block: encodes to \[\"a\"\], which is not a JSON object"),
        ({"headers": {"a": {"b": math.inf}}}, r"^headers of Block: a\.b is inf, which JSON cannot hold"),
        ({"correlation_id": LONG}, r"^correlation_id of Block: 'x+'\.\.\. has 300 characters; the column holds 255"),
        ({"correlation_id": "a\0"}, r"^correlation_id of Block: 'a\\x00' contains NUL"),
        ({"correlation_id": 7}, r"^correlation_id of Block: 7 is not a string"),
    ]
    for options, message in refusals:
        with pytest.raises(InvalidEvent, match=message):
            async with outbox.transaction("Block", **options):
                pytest.fail("the block started")
    assert await written(look) == []


async def test_an_actions_own_parameters_are_checked_too(outbox: Outbox, look: Look) -> None:
    class Rate(Action):
        value: Any

        async def perform(self, tx: Transaction) -> None:
            pytest.fail("perform was called")

    class Listed(Action, array_like=True):
        value: int

    with pytest.raises(InvalidEvent, match="params of Rate: value is nan"):
        await outbox.executor.execute(Rate(math.nan))
    with pytest.raises(InvalidEvent, match=r"params of Listed: encodes to \[1\], which is not a JSON object"):
        await outbox.executor.execute(Listed(1))
    assert await written(look) == []


async def test_nul_in_params_and_headers_is_refused_or_stored_unchanged(outbox: Outbox, look: Look) -> None:
    if stores_nul(outbox):
        async with outbox.transaction("Nul", {"p": "\0"}, headers={"h": "\0"}):
            pass
        (row,) = await written(look)
        assert (row["action_params"], row["headers"]) == ({"p": "\0"}, {"h": "\0"})
        return
    for options, where in (
        ({"params": {"p": "\0"}}, "params of Nul: p "),
        ({"headers": {"h": "\0"}}, "headers of Nul: h "),
    ):
        with pytest.raises(InvalidEvent, match=rf"^{where}'\\x00' contains NUL"):
            async with outbox.transaction("Nul", **options):  # type: ignore[arg-type]
                pass
    assert await written(look) == []


async def test_an_action_name_must_fit_its_column(outbox: Outbox, look: Look) -> None:
    for name, expected in (
        (LONG, "has 300 characters"),
        ("", "'' is blank"),
        (" \n", "is blank"),
        (7, "7 is not a string"),
    ):
        with pytest.raises(InvalidEvent, match=f"^action_name: .*{expected}"):
            async with outbox.transaction(name):  # type: ignore[arg-type]
                pass
    assert await written(look) == []


def test_type_names_are_checked_where_the_class_is_defined() -> None:
    with pytest.raises(InvalidEvent, match=r"^type_name of Long: 'x+'\.\.\. has 300 characters; the column holds 255"):

        class Long(Event, type_name=LONG):
            pass

    with pytest.raises(InvalidEvent, match=r"^an alias of Blank: ' ' is blank"):

        class Blank(Event, aliases={" "}):
            pass

    with pytest.raises(
        InvalidEvent, match=r"^aliases of Text: 'OldName' is one string; pass a set of names: \{'OldName'\}"
    ):

        class Text(Event, aliases="OldName"):
            pass

    with pytest.raises(InvalidEvent, match=r"^type_name of Number: 7 is not a string"):

        class Number(Action, type_name=7):  # type: ignore[arg-type]
            pass


# --- duplicate names ------------------------------------------------------------------------------------------


def classes_with_one_name() -> list[tuple[type[Event], type[Event]]]:
    class Opened(Event):
        a: int = 1

    first = Opened

    class Opened(Event):  # type: ignore[no-redef]
        b: int = 1

    class Other(Event, type_name="Opened"):
        pass

    class Renamed(Event, aliases={"Opened"}):
        pass

    class AlsoRenamed(Event, aliases={"Opened"}):
        pass

    return [(first, Opened), (first, Other), (first, Renamed), (Renamed, first), (Renamed, AlsoRenamed)]


async def test_two_event_classes_with_one_name_are_refused_before_writing(outbox: Outbox, look: Look) -> None:
    for first, second in classes_with_one_name():
        fresh = Outbox("sqlite://", namespace="app")
        fresh.register(first)
        fresh.register(first)
        with pytest.raises(AmbiguousTypeName) as caught:
            fresh.register(second)
        assert (caught.value.first, caught.value.second) == (first, second)
        for part in ("event type 'Opened'", first.__qualname__, second.__qualname__, 'type_name="..."'):
            assert part in str(caught.value)
    first, second = classes_with_one_name()[0]
    expected = "event type 'Opened': .* and .* share this name, so their rows would be indistinguishable"

    def emit_both(tx: Transaction) -> None:
        tx.emit(first())
        tx.emit(second())

    await refused(outbox, look, emit_both, expected)
    with pytest.raises(AmbiguousTypeName):
        outbox.handler(second, name="second")(nothing)
    # The handler was refused whole: its name is free.
    outbox.handler(first, name="second")(nothing)


def test_outboxes_do_not_share_their_type_names() -> None:
    first, second = classes_with_one_name()[0]
    Outbox("sqlite://", namespace="a").register(first)
    Outbox("sqlite://", namespace="b").register(second)


def test_handler_names_and_aliases_are_unique() -> None:
    clashes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"name": "a"}, {"name": "a"}, "handler name 'a' is registered twice"),
        ({"name": "a"}, {"name": "b", "aliases": {"a"}}, "handler alias 'a' is registered twice"),
        ({"name": "a", "aliases": {"b"}}, {"name": "b"}, "handler name 'b' is registered twice"),
        ({"name": "a", "aliases": {"c"}}, {"name": "b", "aliases": {"c"}}, "handler alias 'c' is registered twice"),
    ]
    for first, second, expected in clashes:
        outbox = Outbox("sqlite://", namespace="app")
        outbox.handler(MoneyDeposited, **first)(nothing)
        with pytest.raises(RegistrationError, match=f"{expected}: by .*nothing.* must be unique"):
            outbox.handler(MoneyDeposited, **second)(nothing)
        # Refused input has left no rows behind.
        outbox.handler(MoneyDeposited, name="free", aliases={"also free"})(nothing)
    with pytest.raises(RegistrationError, match=r"handler 'a' has its own name as an alias \(.*nothing\); remove it"):
        Outbox("sqlite://", namespace="app").handler(MoneyDeposited, name="a", aliases={"a"})(nothing)


# --- handlers ---------------------------------------------------------------------------------------------------


def blocking(envelope: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "types", "options", "message"),
    [
        (5, [MoneyDeposited], {"name": "a"}, "handler 'a' must be a function, async or plain: .* is not a function"),
        (
            blocking, [MoneyDeposited], {"name": "a", "delivery": "transactional"},
            r"handler 'a' has delivery='transactional' and is a plain function \(.*blocking\)",
        ),
        (nothing, [MoneyDeposited], {"name": LONG}, r"handler name: 'x+'\.\.\. has 300 characters"),
        (nothing, [MoneyDeposited], {"name": ""}, "handler name: '' is blank"),
        (nothing, [MoneyDeposited], {"name": "a\0"}, r"handler name: 'a\\x00' contains NUL"),
        (nothing, [MoneyDeposited], {"name": 7}, "handler name: 7 is not a string"),
        (nothing, [MoneyDeposited], {"name": "a", "aliases": {LONG}}, "an alias of handler 'a': .* has 300 characters"),
        (nothing, [MoneyDeposited], {"name": "a", "aliases": "b"}, "is one string; pass a set of names: {'b'}"),
        (nothing, [MoneyDeposited], {"name": "a", "topic": LONG}, "the topic of handler 'a': .* has 300 characters"),
        (nothing, [MoneyDeposited], {"name": "a", "topic": " "}, "the topic of handler 'a': ' ' is blank"),
        (nothing, [], {"name": "a"}, "handler 'a' names neither event types nor a topic"),
        (nothing, [NoEvent], {"name": "a"}, "handler 'a' is for .*NoEvent.*, which is not an Event class"),
        (nothing, ["MoneyDeposited"], {"name": "a"}, "handler 'a' is for 'MoneyDeposited', a name .* its class"),
        (nothing, [MoneyDeposited], {"name": "a", "timeout": -1}, "handler 'a' has timeout=-1; expected a duration"),
        (nothing, [MoneyDeposited], {"name": "a", "timeout": "soon"}, "handler 'a' has timeout='soon'; expected a"),
        (nothing, [MoneyDeposited], {"name": "a", "concurrency": 0}, "handler 'a' has concurrency=0; expected 1 or"),
        (nothing, [MoneyDeposited], {"name": "a", "retry": 5}, "handler 'a' has retry=5; expected a RetryPolicy or"),
    ],
)  # fmt: skip
def test_an_invalid_handler_is_refused_at_registration(
    function: Any, types: list[Any], options: dict[str, Any], message: str
) -> None:
    outbox = Outbox("sqlite://", namespace="app")
    with pytest.raises(ConfigurationError, match=message):
        outbox.handler(*types, **options)(function)
    outbox.handler(MoneyDeposited, name="a")(nothing)


def test_an_invalid_handler_object_is_refused_with_the_same_errors() -> None:
    class Nameless(EventHandler[MoneyDeposited]):
        pass

    class Blocking(EventHandler[MoneyDeposited]):
        name = "blocking"
        delivery = "transactional"

        def handle(self, envelope: EventEnvelope[MoneyDeposited]) -> None:
            pass

    outbox = Outbox("sqlite://", namespace="app")
    with pytest.raises(RegistrationError, match=r'Nameless has no name; write `name = "\.\.\."` in the class'):
        outbox.add_handler(Nameless())
    with pytest.raises(RegistrationError, match=r"handler 'blocking' has delivery='transactional' .*Blocking\)"):
        outbox.add_handler(Blocking())
    with pytest.raises(RegistrationError, match=r"add_handler\(\) takes an EventHandler object, not <function nothing"):
        outbox.add_handler(nothing)  # type: ignore[arg-type]


async def test_handlers_are_registered_before_running_only(outbox: Outbox) -> None:
    async with outbox.running():
        with pytest.raises(RegistrationError, match=r"before running\(\) is entered"):
            outbox.handler(MoneyDeposited, name="late")(nothing)
    outbox.handler(MoneyDeposited, name="late")(nothing)


# --- settings and the like ----------------------------------------------------------------------------------------


def test_invalid_settings_and_names_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"setting poll_delay = 3: expected a known setting"):
        Settings(poll_delay=3)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"RetryPolicy\.max_attempts = 0: expected 1 or more, or None"):
        RetryPolicy(max_attempts=0)
    for namespace, expected in ((LONG, "has 300 characters"), ("", "is blank"), (None, "None is not a string")):
        with pytest.raises(OutboxError, match=f"^namespace: .*{expected}"):
            Outbox("sqlite://", namespace=namespace)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="database is an empty mapping; give at least one shard"):
        Outbox({}, namespace="app")
    with pytest.raises(OutboxError, match=r"^shard name: '' is blank"):
        Outbox({"": "sqlite://"}, namespace="app")


# --- unreachable databases ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "message"),
    [
        ("oracle://ada:s3cret@host/app", "shard 'default' has a URL with the scheme 'oracle'; expected a URL"),
        (
            "postgresql+psycopg2://ada:s3cret@host/app",
            r"the scheme 'postgresql\+psycopg2'; expected a URL \(postgresql://",
        ),
        ("app.db", "the scheme ''; expected a URL"),
        ("", "the scheme ''; expected a URL"),
        ("sqlite://app.db", "names a host; for a file write sqlite:///app.db"),
        ("postgresql://ada:s3cret[@host/app", "shard 'default' has a malformed URL"),
        ("postgresql://ada:s3cret@host:port/app", "shard 'default' has a malformed URL"),
        ("postgresql://ada:s3cret#1@host:5432/app", "malformed URL; .*special characters .* written as %XX"),
        ("postgresql://ada:s3cret/1@host:5432/app", "a malformed URL"),
        (Path("app.db"), "shard 'default' is PosixPath; expected a URL"),
        (None, "shard 'default' is NoneType; expected a URL"),
        ({"a": "sqlite://", "b": 7}, "shard 'b' is int; expected a URL"),
        (Shard("oracle://ada:s3cret@host/app"), "the scheme 'oracle'"),
        (
            Shard("postgresql://host/app", direct_url="oracle://ada:s3cret@host/app"),
            "the scheme of direct_url differs",
        ),
    ],
)
def test_an_invalid_database_is_refused_at_once(database: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        Outbox(database, namespace="app")
    assert_no_secret(caught.value)


def assert_no_secret(error: BaseException) -> None:
    assert "s3cret" not in "".join(traceback.format_exception(error))


async def each_first_call(outbox: Outbox, refusal: type[OutboxError], message: str) -> None:
    """Check that whichever call comes first is refused with the same error."""

    async def run() -> None:
        async with outbox.running():
            pass

    ways: list[Callable[[], Awaitable[Any]]] = [
        lambda: outbox.executor.execute(Emit((1,))),
        outbox.check,
        run,
        outbox.drain,
        lambda: outbox.admin.counts(),
    ]
    for way in ways:
        with pytest.raises(refusal, match=message) as caught:
            async with asyncio.timeout(20):
                await way()
        assert_no_secret(caught.value)


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "mariadb"])
async def test_an_unreachable_server_is_named_without_its_password(scheme: str) -> None:
    async with Outbox(f"{scheme}://ada:s3cret@127.0.0.1:1/app", namespace="app") as outbox:
        await each_first_call(outbox, DatabaseUnavailable, "shard 'default' at 127.0.0.1:1/app cannot be reached")
        with pytest.raises(DatabaseUnavailable):
            await outbox.migrate()


async def test_the_failing_one_of_two_addresses_is_named(postgres_url: str) -> None:
    direct = urlsplit(postgres_url)
    shard = Shard("postgresql://ada:s3cret@127.0.0.1:1/app", direct_url=postgres_url)
    async with Outbox(shard, namespace="app") as outbox:
        await outbox.migrate()
        with pytest.raises(DatabaseUnavailable, match=r"at 127\.0\.0\.1:1/app cannot be reached") as caught:
            await outbox.executor.execute(Emit((1,)))
        assert f"{direct.port}" not in str(caught.value)


async def test_several_hosts_of_one_url_are_named() -> None:
    async with Outbox("postgresql://ada:s3cret@127.0.0.1:1,127.0.0.1:2/app", namespace="app") as outbox:
        await each_first_call(outbox, DatabaseUnavailable, r"at 127\.0\.0\.1:1,127\.0\.0\.1:2/app cannot be reached")


async def test_a_missing_database_is_named(server_url: str) -> None:
    async with (
        with_password(server_url, "s3cret") as url,
        Outbox(urlsplit(url)._replace(path="/no_such_database").geturl(), namespace="app") as outbox,
    ):
        await each_first_call(outbox, DatabaseUnavailable, "no_such_database")


async def test_an_unknown_user_is_refused_without_showing_the_password(server_url: str) -> None:
    parts = urlsplit(server_url)
    url = parts._replace(netloc=f"nobody_of_that_name:s3cret@{parts.hostname}:{parts.port}").geturl()
    async with Outbox(url, namespace="app") as outbox:
        await each_first_call(outbox, DatabaseUnavailable, "nobody_of_that_name")


async def test_a_closed_pool_is_named(postgres_url: str) -> None:
    pool = await asyncpg.create_pool(postgres_url, min_size=0, max_size=10)
    await pool.close()
    async with Outbox(pool, namespace="app") as outbox:
        await each_first_call(
            outbox, DatabaseUnavailable, "shard 'default' at the user-supplied pool cannot be reached: pool is clos"
        )


async def test_a_file_in_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "app.db"
    async with Outbox(f"sqlite:///{path}", namespace="app") as outbox:
        await each_first_call(outbox, DatabaseUnavailable, f"at {path} cannot be reached: its directory does not exist")


async def test_a_file_that_is_not_a_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("These are notes, and no database at all. " * 100)
    async with Outbox(f"sqlite:///{path}", namespace="app") as outbox:
        await each_first_call(outbox, DatabaseUnavailable, f"at {path} cannot be reached: file is not a database")
    assert path.read_text().startswith("These are notes")


# --- databases without tables ---------------------------------------------------------------------------------------


@pytest.mark.with_tables(False)
async def test_missing_tables_are_refused_with_the_command_that_creates_them(database_url: str, look: Look) -> None:
    async with Outbox(database_url, namespace="app") as outbox:
        outbox.handler(MoneyDeposited, name="journal")(Journal())
        await look.fetch("CREATE TABLE own (id INT)")

        async def fill(tx: Transaction) -> None:
            await tx.execute("INSERT INTO own VALUES (1)")

        expected = (
            r"the database of shard 'default' lacks table schema_versions, table events, and \d+ more parts: call "
            r"`await outbox\.migrate\(\)`, or run `outboxio migrate` "
            r"\(`outboxio check` lists the parts and the SQL files\)$"
        )
        with pytest.raises(SchemaMissing, match=expected):
            await outbox.executor.execute(doing(fill))
        assert await look.value("SELECT count(*) FROM own") == 0
        assert await open_transactions(database_url) == []

        async def run() -> None:
            async with outbox.running():
                pytest.fail("it runs")

        ways: list[Callable[[], Awaitable[Any]]] = [run, outbox.drain, outbox.check]
        for way in ways:
            with pytest.raises(SchemaMissing, match=expected):
                await way()

        # After the refusals everything works.
        await outbox.migrate()
        await outbox.executor.execute(doing(fill))
        await outbox.check()
        assert await look.value("SELECT count(*) FROM own") == 1


async def test_a_missing_application_table_is_the_applications_error(outbox: Outbox) -> None:
    async def misses(tx: Transaction) -> None:
        await tx.execute("INSERT INTO no_such_table VALUES (1)")

    with pytest.raises(Exception, match="no_such_table") as caught:
        await outbox.executor.execute(doing(misses))
    assert not isinstance(caught.value, OutboxError)


# --- two shards on one database ---------------------------------------------------------------------------------------


async def assert_same_database(outbox: Outbox, shards: str = "'a' and 'b'") -> None:
    expected = f"shards {shards} use the same eventlog; every shard needs its own database"
    with pytest.raises(SameDatabase, match=expected):
        await outbox.check()
    with pytest.raises(SameDatabase, match=expected):
        async with outbox.running():
            pytest.fail("it runs")


async def test_two_shards_of_one_url_are_refused(database_url: str, look: Look) -> None:
    async with Outbox({"a": database_url, "b": database_url}, namespace="app") as outbox:
        await outbox.migrate()
        await assert_same_database(outbox)
        assert await look.value("SELECT count(*) FROM {leases}") == 0


async def test_one_database_under_two_addresses_is_refused(database_url: str, look: Look, tmp_path: Path) -> None:
    parts = urlsplit(database_url)
    if look.is_file:
        link = tmp_path / "linked"
        link.symlink_to(tmp_path, target_is_directory=True)
        other = f"sqlite:///{link / Path(parts.path[1:]).name}"
    elif parts.hostname == "127.0.0.1":
        other = parts._replace(netloc=parts.netloc.replace("127.0.0.1", "localhost")).geturl()
    else:
        pytest.skip("this server has one address that we know of")
    async with Outbox({"a": database_url, "b": other}, namespace="app") as outbox:
        await outbox.migrate()
        await assert_same_database(outbox)


async def test_a_relative_and_an_absolute_path_to_one_file_are_refused(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = f"sqlite:///{Path(urlsplit(sqlite_url).path).name}"
    async with Outbox({"a": sqlite_url, "b": relative}, namespace="app") as outbox:
        await outbox.migrate()
        await assert_same_database(outbox)


async def test_a_pool_and_the_url_of_its_database_are_one_shard(server_url: str) -> None:
    async with (
        actions_on(server_url).pool() as pool,
        Outbox({"a": pool, "b": server_url}, namespace="app") as outbox,
    ):
        await outbox.migrate()
        await assert_same_database(outbox)


# --- small pools ----------------------------------------------------------------------------------------------------


async def test_a_pool_too_small_for_loops_and_one_action_is_refused(server_url: str) -> None:
    acts = actions_on(server_url)
    async with (
        acts.pool(3) as pool,
        Outbox(pool, namespace="app") as outbox,
    ):
        await outbox.migrate()
        room = rf"need (\d+): set {acts.size_option}=\1 or more"
        expected = rf"the pool of shard 'default' holds at most 3 connections, .* {room}"
        with pytest.raises(PoolTooSmall, match=expected) as caught:
            async with outbox.running():
                pytest.fail("it runs")
        with pytest.raises(PoolTooSmall, match=expected):
            await outbox.drain()
    needed = caught.value.needed
    async with (
        acts.pool(needed) as pool,
        Outbox(pool, namespace="app") as outbox,
    ):
        journal = Journal()
        outbox.handler(MoneyDeposited, name="journal")(journal)
        async with outbox.running():
            await outbox.executor.execute(Emit((1, 2)))
            await journal.calls(2)


async def test_a_pool_of_one_connection_is_enough_to_write(server_url: str) -> None:
    """An instance that only executes actions needs no more; migrating and checking must not keep the connection."""
    acts = actions_on(server_url)
    async with (
        acts.pool(1) as pool,
        Outbox(pool, namespace="app") as outbox,
        asyncio.timeout(20),
    ):
        await outbox.migrate()
        await outbox.executor.execute(Emit((1,)))
        await outbox.check()
        await outbox.executor.execute(Emit((2,)))
        assert (await outbox.admin.counts())["undelivered"] == 2
        await outbox.executor.execute(Emit((3,)))
        await acts.becomes_idle(pool)
