"""The brokers started by tests keep messages over a stop and a crash, and restart on the same port."""

from __future__ import annotations

import redis.asyncio as client

from tests.kit.brokers import OwnNats, OwnRabbitmq, OwnRedis


async def test_redis_keeps_its_streams_after_a_crash(own_redis: OwnRedis) -> None:
    name = own_redis.fresh_name()
    async with client.Redis.from_url(own_redis.url) as connection:
        await connection.xadd(name, {"a": "b"})
    own_redis.kill()
    own_redis.start()
    async with client.Redis.from_url(own_redis.url) as connection:
        assert await connection.xlen(name) == 1


async def test_nats_keeps_its_streams_after_a_crash(own_nats: OwnNats) -> None:
    import nats

    name = own_nats.fresh_name()
    connection = await nats.connect(own_nats.url)
    await connection.jetstream().add_stream(name=name, subjects=[name])
    await connection.jetstream().publish(name, b"1")
    await connection.close()
    own_nats.kill()
    own_nats.start()
    connection = await nats.connect(own_nats.url)
    assert (await connection.jetstream().stream_info(name)).state.messages == 1
    await connection.close()


async def test_rabbitmq_keeps_its_queues_after_a_crash(own_rabbitmq: OwnRabbitmq) -> None:
    import aio_pika

    name = own_rabbitmq.fresh_name()
    connection = await aio_pika.connect(own_rabbitmq.url)
    channel = await connection.channel()
    await channel.declare_queue(name, durable=True)
    await channel.default_exchange.publish(aio_pika.Message(b"1", delivery_mode=aio_pika.DeliveryMode.PERSISTENT), name)
    await connection.close()
    own_rabbitmq.kill()
    own_rabbitmq.start()
    connection = await aio_pika.connect(own_rabbitmq.url)
    queue = await (await connection.channel()).declare_queue(name, passive=True)
    assert queue.declaration_result.message_count == 1
    await connection.close()
