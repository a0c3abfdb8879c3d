"""Kafka: committed events reach the topics, and messages of the topics reach the inbox once, whatever fails."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord

from outboxio import Action, ConfigurationError, EventEnvelope, Outbox, Transaction, Unavailable
from outboxio.integrations.kafka import KafkaInbox, KafkaRelay, by_model_type
from tests.kit.app import Look, MoneyDeposited, eventually
from tests.kit.kafka import Kafka, mock_cluster, real_kafka, tansu
from tests.kit.programs import programs
from tests.kit.serving import hang_up, serving

MakeOutbox = Callable[..., Awaitable[Outbox]]
Record = ConsumerRecord[bytes, bytes]

pytestmark = [pytest.mark.not_on("sqlite", "mysql", "mariadb", why="the broker does not know the database")]


class Deposit(Action):
    """Emits a deposit for each of the keys."""

    keys: list[str]
    note: str = ""

    async def perform(self, tx: Transaction) -> None:
        for key in self.keys:
            tx.emit(MoneyDeposited(uuid4(), Decimal(7)), model_id=key, model_type="Wallet", ordering_key=key)


@pytest.fixture(params=[tansu, mock_cluster], ids=["tansu", "mock"])
async def kafka(request: pytest.FixtureRequest) -> AsyncIterator[Kafka]:
    async with request.param() as broker:
        yield broker


@pytest.fixture
async def broker() -> AsyncIterator[Kafka]:
    """A broker that forms groups, behind a proxy."""
    async with tansu() as found:
        yield found


def relay_to(kafka: Kafka, **options: Any) -> KafkaRelay:
    options = {"name": "to-kafka", "types": (MoneyDeposited,), "topics": by_model_type("outbox.{}"), **options}
    return KafkaRelay(kafka.servers, enable_idempotence=kafka.idempotent, **options)


async def read(kafka: Kafka, topic: str, number: int) -> list[Record]:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=kafka.servers, auto_offset_reset="earliest")
    await consumer.start()
    records: list[Record] = []
    try:
        async with asyncio.timeout(60):
            while len(records) < number:
                for some in (await consumer.getmany(timeout_ms=500)).values():
                    records += some
    finally:
        await consumer.stop()
    return records


async def send(kafka: Kafka, topic: str, messages: Sequence[tuple[bytes | None, bytes, dict[str, str]]]) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=kafka.servers, acks="all")
    await producer.start()
    try:
        for key, value, headers in messages:
            details = [(name, text.encode()) for name, text in headers.items()]
            await producer.send_and_wait(topic, value, key=key, headers=details)
    finally:
        await producer.stop()


def ids(records: Sequence[Record]) -> list[str]:
    return [dict(record.headers)["ce_id"].decode() for record in records]


# --- the relay ---------------------------------------------------------------------------------------


async def test_events_reach_the_topic_with_key_and_attributes(
    kafka: Kafka, make_outbox: MakeOutbox, look: Look
) -> None:
    outbox = await make_outbox()
    await kafka.add_topic("outbox.Wallet", 4)
    outbox.add_handler(relay_to(kafka, ordered=True))
    await outbox.executor.execute(Deposit([f"w{i % 7}" for i in range(700)]), correlation_id="c-1")
    drained = await outbox.drain()
    records = await read(kafka, "outbox.Wallet", 700)
    rows = [row for row in await look.events() if row["event_type"] is not None]
    assert drained.succeeded == 700 == len(records)
    assert set(ids(records)) == {str(row["id"]) for row in rows}
    for key in {record.key for record in records}:
        of_key = [each for each in records if each.key == key]
        assert len({each.partition for each in of_key}) == 1
        assert ids(of_key) == [str(row["id"]) for row in rows if row["model_id"].encode() == key]
    headers = {name: value.decode() for name, value in records[0].headers}
    assert headers["content-type"] == "application/json"
    assert headers["ce_type"] == "MoneyDeposited"
    assert headers["ce_source"] == "/app"
    assert headers["ce_specversion"] == "1.0"
    assert headers["ce_correlationid"] == "c-1"
    assert headers["ce_partitionkey"] == headers["ce_subject"] == records[0].key.decode()


async def test_keys_use_the_same_partitions_as_other_clients(kafka: Kafka, make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    await kafka.add_topic("outbox.Wallet", 4)
    outbox.add_handler(relay_to(kafka))
    keys = [f"w{i}" for i in range(20)]
    await outbox.executor.execute(Deposit(keys))
    await outbox.drain()
    await send(kafka, "outbox.Wallet", [(key.encode(), b"{}", {}) for key in keys])
    found = await read(kafka, "outbox.Wallet", 40)
    for key in keys:
        assert len({record.partition for record in found if record.key == key.encode()}) == 1


async def test_an_oversized_message_ends_dead_and_the_others_are_sent(kafka: Kafka, make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    await kafka.add_topic("outbox.Wallet", 1)
    outbox.add_handler(relay_to(kafka, connect={"max_request_size": 20_000}))
    await outbox.executor.execute(Deposit(["a" * 100, "b" * 100]))
    async with outbox.transaction("large") as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal("9" * 25_000)), model_id="c", model_type="Wallet", ordering_key="c")
    await outbox.executor.execute(Deposit(["d"]))
    drained = await outbox.drain()
    [dead] = await outbox.admin.list(state="DEAD")
    assert (drained.succeeded, drained.dead) == (3, 1)
    assert "at most 20000" in dead.errors[-1]["message"]
    assert len(await read(kafka, "outbox.Wallet", 3)) == 3


async def test_an_invalid_topic_is_a_dead_letter_with_its_name(kafka: Kafka, make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    outbox.add_handler(relay_to(kafka, topics="no topic {model_id}"))
    await outbox.executor.execute(Deposit(["a"]))
    assert (await outbox.drain()).dead == 1
    [dead] = await outbox.admin.list(state="DEAD")
    assert "no topic a" in dead.errors[-1]["message"]


async def test_a_returning_broker_gets_events_committed_during_its_outage(
    broker: Kafka, make_outbox: MakeOutbox, look: Look
) -> None:
    assert broker.proxy is not None
    outbox = await make_outbox()
    await broker.add_topic("outbox.Wallet", 2)
    outbox.add_handler(relay_to(broker, ordered=True, publish_timeout=1))
    async with outbox.running():
        await outbox.executor.execute(Deposit(["a", "b"]))
        await read(broker, "outbox.Wallet", 2)
        await broker.proxy.stop()
        for _ in range(10):
            await outbox.executor.execute(Deposit(["a", "b"]))
        await eventually(lambda: outbox.statistics["default"].handlers["to-kafka"].unavailable >= 2)
        assert all(row["attempts"] == 0 for row in await look.notifications() if row["state"] == "PENDING")
        await broker.proxy.start()
        records = await read(broker, "outbox.Wallet", 22)
    order = [str(row["id"]) for row in await look.events() if row["model_id"] == "a"]
    first_seen = list(dict.fromkeys(ids([record for record in records if record.key == b"a"])))
    assert first_seen == order[: len(first_seen)]
    assert not [row for row in await look.notifications() if row["attempts"] > 1]


async def test_an_unresponsive_broker_uses_no_attempt(broker: Kafka, make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox()
    await broker.add_topic("outbox.Wallet", 2)
    outbox.add_handler(relay_to(broker, publish_timeout=0.5))
    async with outbox.running():
        await outbox.executor.execute(Deposit(["a"]))
        await eventually(lambda: outbox.statistics["default"].handlers["to-kafka"].succeeded == 1)
        broker.freeze()
        before = outbox.statistics["default"].handlers["to-kafka"].unavailable
        await outbox.executor.execute(Deposit(["b"]))
        await eventually(lambda: outbox.statistics["default"].handlers["to-kafka"].unavailable >= before + 2)
        [row] = [row for row in await look.notifications() if row["model_id"] == "b"]
        assert (row["state"], row["attempts"]) == ("PENDING", 0)
        broker.thaw()
        await eventually(lambda: outbox.statistics["default"].handlers["to-kafka"].succeeded == 2)
        assert b"b" in {record.key for record in await read(broker, "outbox.Wallet", 2 + before)}


async def test_a_broker_without_idempotent_producers_is_named(
    broker: Kafka, make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = await make_outbox()
    relay = KafkaRelay(broker.servers, name="to-kafka", types=(MoneyDeposited,), topics="t")
    outbox.add_handler(relay)
    with pytest.raises(Exception, match="enable_idempotence=False"):
        await relay.connect()


async def reason(servers: str, **connect: Any) -> str:
    """Why a relay cannot connect."""
    relay = KafkaRelay(servers, name="to-kafka", types=(MoneyDeposited,), topics="t", connect=connect)
    with pytest.raises(Unavailable) as caught:
        await relay.connect()
    return str(caught.value)


async def test_the_reason_of_a_failed_connection_is_reported() -> None:
    assert "no connection to Kafka (127.0.0.1:1): " in await reason("127.0.0.1:1")
    assert "Connect call failed" in await reason("127.0.0.1:1")


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
async def test_wrong_credentials_are_reported_without_the_password(mechanism: str) -> None:
    async with tansu("--authentication") as broker:
        details = await reason(
            broker.servers,
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism=mechanism,
            sasl_plain_username="relay",
            sasl_plain_password="hidden",
        )
        assert f"are user and password for {mechanism} right?" in details
        assert "hidden" not in details
        assert "does the server need TLS or credentials" in await reason(broker.servers)


async def test_a_certificate_mismatch_is_reported(tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    subprocess.run(  # noqa: ASYNC221  # takes 0.1 s
        [*(programs.need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
         *("-subj", "/CN=elsewhere.example", "-keyout", key, "-out", certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with serving(hang_up, context=context) as port:
        details = await reason(f"127.0.0.1:{port}", security_protocol="SSL", ssl_context=ssl.create_default_context())
    assert "certificate verify failed" in details


async def test_wrong_options_are_refused_with_a_fix(make_outbox: MakeOutbox) -> None:
    for options, details in (
        ({"topics": "{wallet}"}, "wallet"),
        ({"topics": ""}, "topics"),
        ({"topics": "t", "connect": {"acks": 1}}, "all replicas"),
        ({"topics": "t", "connect": {"aks": 1}}, "acks"),
    ):
        with pytest.raises(ConfigurationError, match=details):
            KafkaRelay("localhost:9092", name="to-kafka", types=(MoneyDeposited,), **options)
    with pytest.raises(ConfigurationError, match="localhost:9092"):
        KafkaRelay("kafka://localhost", name="to-kafka", types=(MoneyDeposited,), topics="t")
    outbox = await make_outbox()
    with pytest.raises(ConfigurationError, match="start"):
        KafkaInbox(outbox, "localhost:9092", group="g", topics=["t"], start="later")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="commits offsets"):
        KafkaInbox(outbox, "localhost:9092", group="g", topics=["t"], connect={"enable_auto_commit": True})


async def test_a_user_producer_is_used_and_not_stopped(broker: Kafka, make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    await broker.add_topic("mine")
    producer = AIOKafkaProducer(bootstrap_servers=broker.servers, acks="all")
    await producer.start()
    try:
        outbox.add_handler(KafkaRelay(producer, name="to-kafka", types=(MoneyDeposited,), topics="mine"))
        await outbox.executor.execute(Deposit(["a"]))
        assert (await outbox.drain()).succeeded == 1
        await outbox.close()
        await producer.send_and_wait("mine", b"{}")
    finally:
        await producer.stop()


@pytest.mark.parametrize(
    ("options", "details"),
    [({}, "acks=1"), ({"acks": 0}, "acks=0"), ({"transactional_id": "t"}, "has transactional_id=")],
)
async def test_a_user_producer_must_wait_for_all_replicas(options: dict[str, Any], details: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers="localhost:9092", **options)
    with pytest.raises(ConfigurationError, match=details):
        KafkaRelay(producer, name="to-kafka", types=(MoneyDeposited,), topics="mine")
    await producer.stop()


async def test_an_internal_topic_of_kafka_is_dead(kafka: Kafka, make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox()
    outbox.add_handler(relay_to(kafka, topics="{model_id}"))
    await outbox.executor.execute(Deposit(["__consumer_offsets"]))
    await outbox.drain()
    [row] = await look.notifications()
    assert row["state"] == "DEAD"
    assert "is reserved for Kafka" in row["errors"]


# --- the inbox ---------------------------------------------------------------------------------------


class Seen:
    """What the handlers of an outbox received, in order."""

    def __init__(self) -> None:
        self.envelopes: list[EventEnvelope[MoneyDeposited]] = []

    def watch(self, outbox: Outbox) -> None:
        @outbox.handler(MoneyDeposited, name="audit", ordered=True)
        async def audit(envelope: EventEnvelope[MoneyDeposited]) -> None:
            self.envelopes.append(envelope)

    async def until(self, number: int) -> None:
        await eventually(lambda: len(self.envelopes) >= number)


PAYLOAD = b'{"wallet_id": "0192c4e0-1111-7222-8333-444455556666", "amount": "1"}'


def attributes(id: str) -> dict[str, str]:
    return {"ce_specversion": "1.0", "ce_id": id, "ce_type": "MoneyDeposited", "ce_source": "/bank"}


async def test_messages_are_stored_once_and_in_order_per_key(broker: Kafka, make_outbox: MakeOutbox) -> None:
    outbox, seen = await make_outbox(), Seen()
    seen.watch(outbox)
    await broker.add_topic("wallets", 3)
    sent = [(f"k{i % 5}".encode(), PAYLOAD, attributes(f"e{i}")) for i in range(200)]
    await send(broker, "wallets", [*sent, *sent])
    inbox = KafkaInbox(outbox, broker.servers, group="audit", topics=["wallets"], batch=30)
    async with outbox.running(), inbox.running():
        await seen.until(200)
        await send(broker, "wallets", [(b"k0", PAYLOAD, attributes("last"))])
        await seen.until(201)
    assert inbox.received == 201 == len(seen.envelopes)
    for key in range(5):
        of_key = [each.action_params["external_id"] for each in seen.envelopes if each.ordering_key == f"k{key}"]
        assert of_key[:40] == [f"e{i}" for i in range(200) if i % 5 == key]


async def test_a_message_without_an_id_gets_its_offset_as_id(
    broker: Kafka, make_outbox: MakeOutbox, look: Look
) -> None:
    outbox = await make_outbox()
    await broker.add_topic("plain")
    await send(broker, "plain", [(None, PAYLOAD, {}), (None, PAYLOAD, {})])
    inbox = KafkaInbox(outbox, broker.servers, group="audit", topics=["plain"], type="MoneyDeposited")
    async with inbox.running():
        await eventually(lambda: inbox.received >= 2)
    found = {
        (row["source"], row["external_id"])
        for row in await look.fetch("SELECT source, external_id FROM {consumed_events}")
    }
    assert found == {("kafka:plain", "plain/0/0"), ("kafka:plain", "plain/0/1")}


async def test_poison_goes_to_the_dead_letters_and_blocks_nothing(broker: Kafka, make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    await broker.add_topic("wallets")
    await broker.add_topic("wallets.dlq")
    no_type = {"ce_specversion": "1.0", "ce_id": "p1", "ce_source": "/bank"}
    await send(
        broker,
        "wallets",
        [
            (b"k", PAYLOAD, attributes("e0")),
            (b"k", PAYLOAD, no_type),
            (b"k", b"no JSON", attributes("p2")),
            (b"k", PAYLOAD, attributes("e1")),
        ],
    )
    inbox = KafkaInbox(outbox, broker.servers, group="audit", topics=["wallets"])
    async with inbox.running():
        await eventually(lambda: inbox.refused >= 2 and inbox.received >= 2)
    aside = await read(broker, "wallets.dlq", 2)
    assert inbox.received == 2
    assert [record.value for record in aside] == [PAYLOAD, b"no JSON"]
    headers = [dict(record.headers) for record in aside]
    assert [each["ce_id"] for each in headers] == [b"p1", b"p2"]
    assert [each["outboxio-offset"] for each in headers] == [b"1", b"2"]
    assert b"type" in headers[0]["outboxio-error"]
    again = KafkaInbox(outbox, broker.servers, group="audit", topics=["wallets"])
    await send(broker, "wallets", [(b"k", PAYLOAD, attributes("e2"))])
    async with again.running():
        await eventually(lambda: again.received >= 1)
    assert again.refused == 0


async def test_two_consumers_share_the_partitions_and_lose_nothing(broker: Kafka, make_outbox: MakeOutbox) -> None:
    outbox, seen = await make_outbox(), Seen()
    seen.watch(outbox)
    await broker.add_topic("wallets", 4)
    messages = [(f"k{i % 16}".encode(), PAYLOAD, attributes(f"e{i}")) for i in range(1200)]
    await send(broker, "wallets", messages[:400])
    first = KafkaInbox(outbox, broker.servers, group="audit", topics=["wallets"], batch=50)
    second = KafkaInbox(outbox, broker.servers, group="audit", topics=["wallets"], batch=50)
    async with outbox.running(), first.running():
        await seen.until(100)
        async with second.running():
            await send(broker, "wallets", messages[400:800])
            await seen.until(800)
        await send(broker, "wallets", messages[800:])
        await seen.until(1200)
    assert first.received + second.received == 1200 == len(seen.envelopes)


async def test_an_inbox_survives_an_unavailable_broker(
    broker: Kafka, make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    assert broker.proxy is not None
    outbox = await make_outbox()
    await broker.add_topic("wallets")
    await send(broker, "wallets", [(b"k", PAYLOAD, attributes("e0"))])
    inbox = KafkaInbox(outbox, broker.servers, group="audit", topics=["wallets"])
    async with inbox.running():
        await eventually(lambda: inbox.received >= 1)
        await broker.proxy.stop()
        await eventually(lambda: "Unable connect to node" in caplog.text)
        await broker.proxy.start()
        await send(broker, "wallets", [(b"k", PAYLOAD, attributes("e1"))])
        await eventually(lambda: inbox.received >= 2)


async def test_relay_and_inbox_work_with_a_real_kafka(make_outbox: MakeOutbox) -> None:
    async with real_kafka() as servers:
        outbox, seen = await make_outbox(), Seen()
        topic = f"outbox.{uuid4()}"
        outbox.add_handler(KafkaRelay(servers, name="to-kafka", types=(MoneyDeposited,), topics=topic, ordered=True))
        other = await make_outbox("other")
        seen.watch(other)
        await outbox.executor.execute(Deposit([f"w{i % 7}" for i in range(700)]))
        await outbox.drain()
        async with other.running(), KafkaInbox(other, servers, group=topic, topics=[topic]).running():
            await seen.until(700)
