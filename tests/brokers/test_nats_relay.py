"""The relay to NATS JetStream, on a real server."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import DiscardPolicy

from outboxio import ConfigurationError, Outbox, RetryPolicy
from outboxio.integrations.nats import NatsRelay
from tests.contract.test_tls import certificate
from tests.kit.app import Look, eventually
from tests.kit.nats_notes import Noted, Other, has_failed, note, numbers_of, relay, stored, stream, succeeded
from tests.kit.nats_server import NatsServer, nats_server
from tests.kit.ports import free_port
from tests.kit.programs import programs

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
Add = Callable[..., NatsRelay]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def outbox(make_outbox: MakeOutbox) -> Outbox:
    return await make_outbox()


@pytest.fixture
async def add(outbox: Outbox) -> AsyncIterator[Callable[..., NatsRelay]]:
    """Adds a relay to the outbox and closes it at the end, even if a test cancelled the outbox."""
    added: list[NatsRelay] = []

    def add(servers: Any, **options: Any) -> NatsRelay:
        added.append(relay(servers, **options))
        outbox.add_handler(added[-1])
        return added[-1]

    yield add
    for one in added:
        await one.close()


async def test_each_event_is_a_message_with_cloudevents_attributes(
    outbox: Outbox, add: Add, broker: NatsServer
) -> None:
    add(broker.url)
    async with stream(broker) as jetstream:
        async with outbox.transaction("note", correlation_id="c-1") as tx:
            tx.emit(Noted(1), model_id="\u00e4 1", model_type="Note")
            tx.emit(Other(2))
        await outbox.drain()
        [message] = await stored(jetstream)
    headers = message.headers or {}
    assert (message.subject, numbers_of([message])) == ("notes.Noted", [1])
    assert headers["ce-type"] == "Noted"
    assert headers["ce-source"] == f"/{outbox.namespace}"
    assert headers["ce-subject"] == headers["ce-partitionkey"] == "%C3%A4%201"
    assert headers["ce-correlationid"] == "c-1"
    assert headers["content-type"] == "application/json"
    assert headers["Nats-Msg-Id"] == headers["ce-id"]


async def test_a_message_sent_again_is_stored_once(outbox: Outbox, add: Add, broker: NatsServer, look: Look) -> None:
    add(broker.url)
    async with stream(broker) as jetstream:
        await note(outbox, 1, 2, 3)
        await outbox.drain()
        await look.fetch("UPDATE {event_notifications} SET state = 'PENDING', attempts = 0")
        async with outbox.running():
            await eventually(lambda: succeeded(look, 3))
        assert numbers_of(await stored(jetstream)) == [1, 2, 3]


async def row_of(look: Look, ends: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The only notification, once it has this outcome."""

    async def has_ended() -> bool:
        rows = await look.notifications()
        return bool(rows) and ends(rows[0])

    await eventually(has_ended)
    return (await look.notifications())[0]


async def test_a_subject_without_a_stream_is_retried_and_reported(
    outbox: Outbox, add: Add, broker: NatsServer, look: Look
) -> None:
    add(broker.url, retry=RetryPolicy(base=0.01, cap=0.01))
    await note(outbox, 1)
    async with outbox.running():
        row = await row_of(look, lambda row: row["attempts"] >= 2)
        assert "no stream matches the subject 'notes.Noted'" in row["errors"]
        async with stream(broker) as jetstream:
            await eventually(lambda: succeeded(look, 1))
            assert numbers_of(await stored(jetstream)) == [1]


@pytest.mark.parametrize("where", ["server", "stream"])
async def test_an_oversized_message_is_dead_and_blocks_nothing(
    where: str, outbox: Outbox, add: Add, broker: NatsServer, look: Look
) -> None:
    add(broker.url)
    config = {"max_msg_size": 20_000} if where == "stream" else {}
    async with stream(broker, **config) as jetstream:
        async with outbox.transaction("note") as tx:
            tx.emit(Noted(1))
            tx.emit(Noted(2, "x" * (1_048_400 if where == "server" else 30_000)))
            tx.emit(Noted(3))
        async with outbox.running():
            await eventually(lambda: succeeded(look, 2))
        assert numbers_of(await stored(jetstream)) == [1, 3]
    [row] = [row for row in await look.notifications() if row["state"] == "DEAD"]
    assert ("the server accepts at most 1048576" if where == "server" else "message size exceeds") in row["errors"]


async def test_a_full_stream_uses_attempts_and_names_the_reason(
    outbox: Outbox, add: Add, broker: NatsServer, look: Look
) -> None:
    add(broker.url, retry=RetryPolicy(max_attempts=2, base=0.01))
    async with stream(broker, max_msgs=1, discard=DiscardPolicy.NEW) as jetstream:
        await jetstream.publish("notes.first", b"{}")
        await note(outbox, 1)
        async with outbox.running():
            row = await row_of(look, lambda row: row["state"] == "DEAD")
    assert "JetStream refused the message to 'notes.Noted': maximum messages exceeded" in row["errors"]


async def test_order_holds_within_each_key(outbox: Outbox, add: Add, broker: NatsServer, look: Look) -> None:
    add(broker.url, ordered=True)
    async with stream(broker) as jetstream:
        for number in range(60):
            await note(outbox, number, ordering_key=f"k{number % 3}")
        async with outbox.running():
            await eventually(lambda: succeeded(look, 60))
        got = numbers_of(await stored(jetstream))
    assert sorted(got) == list(range(60))
    for key in range(3):
        assert [number for number in got if number % 3 == key] == list(range(key, 60, 3))


async def test_events_from_the_inbox_are_not_relayed_again(outbox: Outbox, add: Add, broker: NatsServer) -> None:
    add(broker.url)
    async with stream(broker) as jetstream:
        await outbox.inbox.receive(source="/other", external_id="1", type="Noted", payload={"number": 1})
        await note(outbox, 2)
        await outbox.drain()
        assert numbers_of(await stored(jetstream)) == [2]


async def test_the_outbox_closes_the_relays_own_connection(make_outbox: MakeOutbox, broker: NatsServer) -> None:
    outbox = await make_outbox()
    outbox.add_handler(one := relay(broker.url))
    async with stream(broker) as jetstream:
        await note(outbox, 1)
        await outbox.drain()
        client = one._connection.client
        assert client.is_connected
        await outbox.close()
        assert client.is_closed
        assert numbers_of(await stored(jetstream)) == [1]


async def test_a_user_supplied_client_stays_open(outbox: Outbox, add: Add, broker: NatsServer) -> None:
    async with stream(broker) as jetstream:
        client = await nats.connect(broker.url)
        given = add(client)
        await note(outbox, 1)
        await outbox.drain()
        await given.close()
        assert client.is_connected
        assert numbers_of(await stored(jetstream)) == [1]
        await client.close()


@pytest.mark.parametrize("connect", [{"user": "app", "password": "wrong"}, {}, {"token": "t"}])
async def test_wrong_credentials_have_a_clear_reason(connect: dict[str, Any], tmp_path: Path) -> None:
    reason = r"relay 'to-nats' has no connection to NATS .*Authorization"
    with nats_server(tmp_path / "nats", "authorization { user: app, password: right }") as server:
        one = relay(server.url, connect=connect)
        with pytest.raises(ConnectionError, match=reason):
            await one.connect()


async def test_a_certificate_mismatch_has_a_clear_reason(tmp_path: Path) -> None:
    programs.need("openssl")
    made = certificate(tmp_path, "elsewhere.example")
    tls = f'tls {{ cert_file: "{made}", key_file: "{made.with_suffix(".key")}" }}'
    with nats_server(tmp_path / "nats", tls) as server:
        for trusts, reason in ((None, "self-signed certificate"), (str(made), "not valid for '127.0.0.1'")):
            context = ssl.create_default_context(cafile=trusts)
            with pytest.raises(ConnectionError, match=reason):
                await relay(server.url, connect={"tls": context}).connect()


async def test_the_reason_contains_no_password() -> None:
    secret = relay(f"nats://app:geheim@127.0.0.1:{free_port()}")
    with pytest.raises(ConnectionError, match=r"\*\*\*@127.0.0.1") as raised:
        await secret.connect()
    assert "geheim" not in str(raised.value)
    assert "Connect call failed" in str(raised.value)


async def test_wrong_credentials_use_no_attempt(outbox: Outbox, add: Add, tmp_path: Path, look: Look) -> None:
    with nats_server(tmp_path / "nats", "authorization { user: app, password: old }") as server:
        calls = 0

        def password() -> str:
            nonlocal calls
            calls += 1
            return "new"

        add(server.url, connect={"user": "app", "password": password})
        await note(outbox, 1)
        async with outbox.running():
            await eventually(lambda: calls >= 3)
            [row] = await look.notifications()
            assert (row["state"], row["attempts"], row["errors"]) == ("PENDING", 0, "[]")
            server.configure("authorization { user: app, password: new }")
            server.restart()
            client = await nats.connect(server.url, user="app", password="new")
            await client.jetstream().add_stream(name="NOTES", subjects=["notes.>"])
            await client.close()
            await eventually(lambda: succeeded(look, 1))


async def test_a_forbidden_subject_blocks_no_other_subject(
    outbox: Outbox, add: Add, tmp_path: Path, look: Look
) -> None:
    allowed = 'authorization { users: [{ user: app, password: a, permissions: { publish: { deny: "notes.Other" } } }] }'
    with nats_server(tmp_path / "nats", allowed) as server:
        secret = server.url.replace("//", "//app:a@")
        add(secret, types=(Noted, Other), publish_timeout=1, retry=RetryPolicy(base="50ms", factor=1))
        client = await nats.connect(secret)
        await client.jetstream().add_stream(name="NOTES", subjects=["notes.>"])
        await client.close()
        async with outbox.transaction("note") as tx:
            tx.emit(Noted(1))
            tx.emit(Other(2))
        async with outbox.running():
            await eventually(lambda: succeeded(look, 1))
            await eventually(lambda: has_failed(look))
    [row] = [row for row in await look.notifications() if row["state"] != "SUCCEEDED"]
    assert "may not publish to 'notes.Other'" in row["errors"]


async def test_an_unavailable_broker_uses_no_attempt_and_work_resumes(
    outbox: Outbox, add: Add, tmp_path: Path, look: Look
) -> None:
    with nats_server(tmp_path / "nats") as server:
        add(server.url)
        client = await nats.connect(server.url)
        await client.jetstream().add_stream(name="NOTES", subjects=["notes.>"])
        await client.close()
        async with outbox.running():
            await note(outbox, 1)
            await eventually(lambda: succeeded(look, 1))
            server.kill()
            await note(outbox, 2, 3)
            await eventually(lambda: rows(look, 3))
            states = await look.states()
            assert states == {"SUCCEEDED": 1, "PENDING": 2}
            assert sum(row["attempts"] for row in await look.notifications()) == 1
            server.start()
            await eventually(lambda: succeeded(look, 3))
        client = await nats.connect(server.url)
        assert sorted(numbers_of(await stored(client.jetstream()))) == [1, 2, 3]
        await client.close()


async def rows(look: Look, number: int) -> bool:
    return len(await look.notifications()) == number


@pytest.mark.parametrize(
    "subject",
    [
        "notes..x",
        "notes.*",
        "notes. x",
        ".{event_type}",
        "notes.{even_type}",
        "",
        "$JS.API.{key}",
        "${key}",
        "_INBOX.x",
    ],
)
def test_an_invalid_subject_template_is_refused(subject: str) -> None:
    with pytest.raises(ConfigurationError, match="subject"):
        relay("nats://localhost", subject=subject)


def test_without_the_extra_the_error_names_the_package() -> None:
    code = "import sys; sys.modules['nats'] = None; import outboxio.integrations.nats"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert "ConfigurationError: outboxio.integrations.nats needs nats-py: pip install 'outboxio[nats]'" in run.stderr
