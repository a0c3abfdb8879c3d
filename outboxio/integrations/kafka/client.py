"""The only module that imports aiokafka, which has no types. All uses of its private attributes are here."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

_client: Any = import_module("aiokafka")
_connections: Any = import_module("aiokafka.conn")
_partitions: Any = import_module("aiokafka.partitioner")
_told: Any = import_module("aiokafka.errors")

Producer: type[Any] = _client.AIOKafkaProducer
Consumer: type[Any] = _client.AIOKafkaConsumer
Listener: type[Any] = _client.ConsumerRebalanceListener
TopicPartition: Any = _client.TopicPartition
create_conn: Any = _connections.create_conn
murmur2: Any = _partitions.murmur2

KafkaError: type[Exception] = _told.KafkaError
ConnectionFailed: type[Exception] = _told.KafkaConnectionError
ProducerClosed: type[Exception] = _told.ProducerClosed
UnknownTopic: type[Exception] = _told.UnknownTopicOrPartitionError
TopicForbidden: type[Exception] = _told.TopicAuthorizationFailedError

TOO_LARGE: tuple[type[Exception], ...] = (_told.MessageSizeTooLargeError, _told.RecordListTooLargeError)
GONE: tuple[type[Exception], ...] = (
    _told.KafkaConnectionError,
    _told.KafkaTimeoutError,
    _told.NodeNotReadyError,
    _told.OutOfOrderSequenceNumber,
    _told.ProducerClosed,
    _told.ProducerFenced,
    _told.RequestTimedOutError,
    _told.UnknownProducerId,
)
"""Errors of the connection and of the producer, not of a message: the relay opens a new producer."""


ALL_REPLICAS = -1  # acks="all", as aiokafka keeps it


def is_started(producer: Any) -> bool:
    """True if ``producer.start()`` has ended without an error."""
    return producer._sender.sender_task is not None


def unfit(producer: Any) -> str | None:
    """The reason why the answers of a producer do not mean that Kafka has stored a message; ``None`` if they do."""
    acks, transactions = producer._sender._acks, producer._txn_manager
    if transactions is not None and transactions.transactional_id is not None:
        return "it has transactional_id=, and your transaction decides whether a message is stored; leave it out"
    if acks != ALL_REPLICAS:
        return f"it has acks={acks}, and a message that is acknowledged could be lost; give it acks='all'"
    return None


async def end(producer: Any) -> None:
    """End a producer, and send nothing of what waits in it.

    ``producer.stop()`` would send all that waits, and an idempotent producer tries for ever while the broker is away.
    """
    sender: asyncio.Task[None] | None = producer._sender.sender_task
    if sender is not None:
        sender.cancel()
    await producer.client.close()  # requests on their way fail
    if sender is not None:
        for _ in range(2):  # the first cancellation waits for requests to be put back
            await asyncio.wait([sender], timeout=1)
            sender.cancel()
        if sender.done() and not sender.cancelled():
            sender.exception()  # of requests that failed: their messages have a verdict
    producer._closed = True
