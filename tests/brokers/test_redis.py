"""The relay to a Redis stream and the inbox of a Redis stream, on a real server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as client

from outboxio import ConfigurationError, Event, Outbox, RetryPolicy
from outboxio.integrations.redis import REMEMBERS_IDS, RedisInbox, RedisRelay, version_of
from tests.contract.test_tls import certificate
from tests.kit.app import Look, eventually
from tests.kit.brokers import PASSWORD, Broker, OwnRedis

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
Add = Callable[..., RedisRelay]


class Noted(Event):
    number: int
    text: str = ""


@pytest.fixture
async def outbox(make_outbox: MakeOutbox) -> Outbox:
    return await make_outbox()


@pytest.fixture
async def add(outbox: Outbox) -> AsyncIterator[Add]:
    """Adds a relay to the outbox and closes it at the end."""
    added: list[RedisRelay] = []

    def add(server: Any, **options: Any) -> RedisRelay:
        added.append(RedisRelay(server, **{"name": "to-redis", "types": (Noted,)} | options))
        outbox.add_handler(added[-1])
        return added[-1]

    yield add
    for one in added:
        await one.close()


@pytest.fixture
async def store(redis: Broker) -> AsyncIterator[client.Redis]:
    async with client.Redis.from_url(redis.url) as connection:
        yield connection


@pytest.fixture
def stream(redis: Broker) -> str:
    return redis.fresh_name()


async def note(outbox: Outbox, *numbers: int, **emit: Any) -> None:
    async with outbox.transaction("note") as tx:
        for number in numbers:
            tx.emit(Noted(number), **emit)


async def numbers_in(store: client.Redis, stream: str) -> list[int]:
    return [json.loads(fields[b"data"])["number"] for _, fields in await store.xrange(stream)]


async def stored(look: Look) -> list[int]:
    return [json.loads(row["payload"])["number"] for row in await look.events() if row["event_type"] == "Noted"]


async def has(look: Look, numbers: list[int]) -> bool:
    return sorted(await stored(look)) == numbers


async def send(store: client.Redis, stream: str, *numbers: int, **changes: Any) -> None:
    for number in numbers:
        fields = {"ce_id": f"m-{number}", "ce_type": "Noted", "ce_source": "/n", "data": json.dumps({"number": number})}
        await store.xadd(stream, fields | changes)


async def was_logged(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    return words in caplog.text


async def test_each_event_is_an_entry_with_cloudevents_attributes(
    outbox: Outbox, add: Add, redis: Broker, store: client.Redis, stream: str
) -> None:
    add(redis.url, stream=stream)
    await note(outbox, 1, model_id="\u00e4 1")
    await outbox.drain()
    [(_, fields)] = await store.xrange(stream)
    assert fields[b"ce_type"] == b"Noted"
    assert fields[b"ce_source"].decode() == f"/{outbox.namespace}"
    assert fields[b"ce_subject"].decode() == "\u00e4 1"
    assert fields[b"content-type"] == b"application/json"


@pytest.mark.parametrize("ordered", [True, False])
async def test_events_of_a_key_keep_their_order(
    outbox: Outbox, add: Add, redis: Broker, store: client.Redis, stream: str, ordered: bool
) -> None:
    add(redis.url, stream=stream, ordered=ordered)
    await note(outbox, *range(300), **({"ordering_key": "k"} if ordered else {}))
    await outbox.drain()
    numbers = await numbers_in(store, stream)
    assert (numbers if ordered else sorted(numbers)) == list(range(300))


async def test_a_stream_keeps_about_maxlen_messages(
    outbox: Outbox, add: Add, redis: Broker, store: client.Redis, stream: str
) -> None:
    add(redis.url, stream=stream, maxlen=100)
    await note(outbox, *range(500))
    await outbox.drain()
    assert 100 <= await store.xlen(stream) <= 300  # Redis removes whole nodes of 100 entries


async def test_a_key_that_is_not_a_stream_is_reported_and_retried(
    outbox: Outbox, add: Add, redis: Broker, store: client.Redis, stream: str, look: Look,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    await store.set(stream, "text")
    add(redis.url, stream=stream, retry=RetryPolicy(base="1h"))
    await note(outbox, 1)
    await outbox.drain()
    assert [(row["state"], row["attempts"]) for row in await look.notifications()] == [("FAILED", 1)]
    assert "the key does not hold a stream" in caplog.text


async def test_an_oversized_message_is_dead_and_its_batch_arrives(
    outbox: Outbox, add: Add, own_redis: OwnRedis, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    name = own_redis.fresh_name()
    add(own_redis.url, stream=name)
    async with outbox.transaction("note") as tx:
        for number in range(20):
            tx.emit(Noted(number, "x" * 1_100_000 if number == 7 else ""))
    await outbox.drain()
    async with client.Redis.from_url(own_redis.url) as store:
        assert sorted(await numbers_in(store, name)) == sorted(set(range(20)) - {7})
    assert [row["state"] for row in await look.notifications()].count("DEAD") == 1
    assert "Redis accepts at most 1048576" in caplog.text


async def test_wrong_credentials_use_no_attempt(
    outbox: Outbox, add: Add, own_redis: OwnRedis, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    add(own_redis.url_with_wrong_password, stream="any")
    await note(outbox, 1)
    async with outbox.running():
        await eventually(lambda: was_logged(caplog, "has no connection to Redis"))
    assert [(row["state"], row["attempts"]) for row in await look.notifications()] == [("PENDING", 0)]
    assert ":wrong@" not in caplog.text


async def test_an_untrusted_certificate_uses_no_attempt(
    outbox: Outbox, add: Add, own_redis: OwnRedis, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    add(own_redis.tls_url, stream="any")
    await note(outbox, 1)
    async with outbox.running():
        await eventually(lambda: was_logged(caplog, "CERTIFICATE_VERIFY_FAILED"))
    assert [row["attempts"] for row in await look.notifications()] == [0]


async def test_events_are_sent_over_tls(outbox: Outbox, add: Add, own_redis: OwnRedis) -> None:
    name = own_redis.fresh_name()
    add(own_redis.tls_url, stream=name, connect={"ssl_ca_certs": str(own_redis.certificate)})
    await note(outbox, 1)
    await outbox.drain()
    async with client.Redis.from_url(own_redis.url) as store:
        assert await numbers_in(store, name) == [1]


async def test_relay_and_inbox_continue_after_an_outage_of_redis(
    outbox: Outbox, add: Add, own_redis: OwnRedis, look: Look
) -> None:
    name = own_redis.fresh_name()
    add(own_redis.url, stream=name)
    async with outbox.running(), RedisInbox(outbox, own_redis.url, stream=name, group="g").running():
        await note(outbox, 1)
        await eventually(lambda: has(look, [1, 1]))
        own_redis.stop()
        await note(outbox, 2, 3)
        own_redis.start()
        await eventually(lambda: has(look, [1, 1, 2, 2, 3, 3]))
    assert all(not row["attempts"] or row["state"] == "SUCCEEDED" for row in await look.notifications())


async def test_each_message_is_stored_once_and_acknowledged(
    outbox: Outbox, redis: Broker, store: client.Redis, stream: str, look: Look
) -> None:
    await send(store, stream, *range(20))
    await send(store, stream, 7, 8)  # a second time
    async with RedisInbox(outbox, redis.url, stream=stream, group="g", batch=6).running():
        await send(store, stream, 20)
        await eventually(lambda: has(look, list(range(21))))
    assert (await store.xpending(stream, "g"))["pending"] == 0
    assert await store.xinfo_consumers(stream, "g") == []


async def test_poison_is_moved_to_the_dead_stream_and_blocks_nothing(
    outbox: Outbox, redis: Broker, store: client.Redis, stream: str, look: Look
) -> None:
    await send(store, stream, 1)
    await send(store, stream, 2, data="{broken")
    await store.xadd(stream, {"foo": "bar"})
    await send(store, stream, 4)

    async def all_settled() -> bool:
        return await store.xlen(f"{stream}.dead") == 2 and await has(look, [1, 4])

    async with RedisInbox(outbox, redis.url, stream=stream, group="g").running():
        await eventually(all_settled)
    dead = [fields for _, fields in await store.xrange(f"{stream}.dead")]
    assert dead[0][b"data"] == b"{broken"
    assert b"is not valid JSON" in dead[0][b"outboxio_reason"]
    assert dead[1][b"foo"] == b"bar"
    assert (await store.xpending(stream, "g"))["pending"] == 0


async def test_poison_stays_pending_until_the_dead_stream_accepts_it(
    outbox: Outbox, redis: Broker, store: client.Redis, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    await store.set(f"{stream}.dead", "no stream")
    await send(store, stream, 1, data="{broken")
    async with RedisInbox(outbox, redis.url, stream=stream, group="g").running():
        await eventually(lambda: was_logged(caplog, "WRONGTYPE"))
        assert (await store.xpending(stream, "g"))["pending"] == 1
        await store.delete(f"{stream}.dead")
        await eventually(lambda: is_moved(store, stream))
    assert (await store.xpending(stream, "g"))["pending"] == 0


async def is_moved(store: client.Redis, stream: str) -> bool:
    return await store.xlen(f"{stream}.dead") == 1


async def test_a_reply_without_an_id_is_not_an_acknowledgement(
    outbox: Outbox, add: Add, redis: Broker, store: client.Redis, stream: str, look: Look
) -> None:
    """As from a client inside a transaction of the application."""
    async with client.Redis.from_url(redis.url, max_connections=1) as given:
        add(given, stream=stream, retry=RetryPolicy(base="1h"))
        await note(outbox, 1)
        await outbox.drain()
        await given.execute_command("MULTI")
        await note(outbox, 2)
        await outbox.drain()
        await given.execute_command("DISCARD")
    assert await numbers_in(store, stream) == [1]
    [row] = [row for row in await look.notifications() if row["state"] == "FAILED"]
    assert "Redis did not return a message id" in row["errors"]


async def test_a_message_without_an_id_gets_its_entry_id(
    outbox: Outbox, redis: Broker, store: client.Redis, stream: str, look: Look
) -> None:
    await store.xadd(stream, {"data": '{"number": 5}'})
    async with RedisInbox(outbox, redis.url, stream=stream, group="g", type="Noted").running():
        await eventually(lambda: has(look, [5]))


async def test_two_inboxes_share_a_stream(
    outbox: Outbox, redis: Broker, store: client.Redis, stream: str, look: Look
) -> None:
    one, two = (RedisInbox(outbox, redis.url, stream=stream, group="g", batch=5) for _ in range(2))
    async with one.running(), two.running():
        await send(store, stream, *range(60))
        await eventually(lambda: has(look, list(range(60))))
    assert one.received + two.received == 60


async def test_messages_of_a_dead_consumer_are_taken_over(
    outbox: Outbox, redis: Broker, store: client.Redis, stream: str, look: Look
) -> None:
    await send(store, stream, *range(10))
    await store.xgroup_create(stream, "g", id="0")
    await store.xreadgroup("g", "dead", {stream: ">"}, count=4)
    async with RedisInbox(outbox, redis.url, stream=stream, group="g", claim_after=0.2).running():
        await eventually(lambda: has(look, list(range(10))))
    assert (await store.xpending(stream, "g"))["pending"] == 0


async def test_an_inbox_without_access_reports_why_and_loses_nothing(
    outbox: Outbox, own_redis: OwnRedis, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    name = own_redis.fresh_name()
    async with client.Redis.from_url(own_redis.url) as store:
        await send(store, name, 1, 2)
        try:
            async with RedisInbox(outbox, own_redis.url_with_wrong_password, stream=name, group="g").running():
                await eventually(lambda: was_logged(caplog, "invalid username-password pair"))
                assert await stored(look) == []
                await store.config_set("requirepass", "wrong")  # the password of the inbox is correct now
                await eventually(lambda: has(look, [1, 2]))
        finally:
            await store.config_set("requirepass", PASSWORD)
        assert (await store.xpending(name, "g"))["pending"] == 0
    assert f"inbox of stream {name} (g): connection to the broker lost" in caplog.text
    assert "has no connection to Redis" in caplog.text
    assert ":wrong@" not in caplog.text


async def test_an_inbox_with_an_untrusted_broker_reports_why(
    outbox: Outbox, own_redis: OwnRedis, look: Look, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    trusted, name = certificate(tmp_path, "elsewhere.example"), own_redis.fresh_name()
    inbox = RedisInbox(outbox, own_redis.tls_url, stream=name, group="g", connect={"ssl_ca_certs": str(trusted)})
    async with client.Redis.from_url(own_redis.url) as store:
        await send(store, name, 1, 2)
        async with inbox.running():
            await eventually(lambda: was_logged(caplog, "CERTIFICATE_VERIFY_FAILED"))
            assert await stored(look) == []
            trusted.write_bytes(own_redis.certificate.read_bytes())
            await eventually(lambda: has(look, [1, 2]))
    assert "has no connection to Redis" in caplog.text


def test_redis_8_6_remembers_ids() -> None:
    assert version_of("8.6.0") >= REMEMBERS_IDS
    assert version_of("10.0") >= REMEMBERS_IDS
    assert not version_of("7.0.15") >= REMEMBERS_IDS
    assert not version_of("") >= REMEMBERS_IDS


@pytest.mark.parametrize("maxlen", [0, -1, "5"])
def test_maxlen_is_at_least_1(maxlen: Any) -> None:
    with pytest.raises(ConfigurationError, match="maxlen"):
        RedisRelay("redis://localhost", name="r", types=(Noted,), stream="s", maxlen=maxlen)
