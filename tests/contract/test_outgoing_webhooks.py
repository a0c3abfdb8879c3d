"""Outgoing webhooks: one signed delivery per event and endpoint with retries; no endpoint delays another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from standardwebhooks import Webhook

from benchmarks.webhooks import latencies
from outboxio import ConfigurationError, Event, EventEnvelope, Outbox, RetryPolicy, Settings
from outboxio.integrations.webhooks import Endpoint, WebhookEndpointDisabled, Webhooks
from outboxio.testing import MovableClock
from tests.kit.app import Journal, Look, eventually
from tests.kit.endpoints import OK, OTHER_SECRET, SECRET, Receiver, answer, receiving

MakeOutbox = Callable[..., Awaitable[Outbox]]
LOCAL = ["127.0.0.0/8"]


class OrderShipped(Event):
    tenant: str
    order: int


async def ship(outbox: Outbox, *orders: int, tenant: str = "acme", topic: str | None = None) -> None:
    async with outbox.transaction("ship") as tx:
        for order in orders:
            tx.emit(OrderShipped(tenant, order), model_id=order, model_type="Order", topic=topic)


async def hooks(make_outbox: MakeOutbox, endpoints: Any, clock: MovableClock | None = None, **options: Any) -> Outbox:
    outbox = await make_outbox(clock=clock, settings=options.pop("settings", None))
    outbox.add_handler(Webhooks(name="hooks", types=[OrderShipped], endpoints=endpoints, allow=LOCAL, **options))
    return outbox


async def deliveries(look: Look, handler: str = "hooks.deliveries") -> list[dict[str, Any]]:
    return [row for row in await look.notifications() if row["handler_name"] == handler]


def orders(receiver: Receiver) -> list[int]:
    """The orders of the requests, each verified as a customer does."""
    return [Webhook(SECRET).verify(one.body, one.headers)["data"]["order"] for one in receiver.requests]


async def test_the_public_library_verifies_received_webhooks(make_outbox: MakeOutbox, wallets_table: None) -> None:
    async with receiving() as receiver:
        seen: list[tuple[Any, ...]] = []

        async def endpoints(envelope: EventEnvelope[OrderShipped]) -> list[Endpoint]:
            assert await envelope.tx.fetchval("SELECT count(*) FROM wallets") == 0
            seen.append(
                (envelope.event, envelope.event_id, envelope.event_type, envelope.model_id, envelope.model_type)
            )
            return [Endpoint(receiver.url, [SECRET], id=envelope.event.tenant)]

        outbox = await hooks(make_outbox, endpoints)
        await ship(outbox, 7)
        await outbox.drain()

        assert orders(receiver) == [7]
        (request,) = receiver.requests
        body = Webhook(SECRET).verify(request.body, request.headers)
        assert body.keys() == {"type", "timestamp", "data"}
        assert body["type"] == "OrderShipped"
        assert body["timestamp"].endswith("Z")
        assert UUID(request.headers["webhook-id"]) == seen[0][1]
        assert seen[0] == seen[1] == (OrderShipped("acme", 7), seen[0][1], "OrderShipped", "7", "Order")
        await outbox.close()


@pytest.mark.above_statements
class TestDeliveries:
    async def test_each_endpoint_has_its_own_attempts(self, make_outbox: MakeOutbox, look: Look) -> None:
        async with receiving() as good, receiving() as bad:
            bad.answer = answer(500, "out of order" * 100)
            outbox = await hooks(
                make_outbox, [Endpoint(good.url, [SECRET], "good"), Endpoint(bad.url, [SECRET], "bad")]
            )
            await ship(outbox, 1)
            await outbox.drain()

            rows = {row["endpoint"]: row for row in await self._with_endpoints(look)}
            assert (rows["good"]["state"], rows["bad"]["state"]) == ("SUCCEEDED", "FAILED")
            assert "the endpoint answered 500: out of order" in rows["bad"]["errors"]
            assert "out of order" * 50 not in rows["bad"]["errors"]
            stored = str(await look.events())
            assert SECRET not in stored
            assert str(good.port) not in stored
            await outbox.close()

    @staticmethod
    async def _with_endpoints(look: Look) -> list[dict[str, Any]]:
        return await look.fetch(
            "SELECT n.state, n.errors, n.model_id AS endpoint FROM {event_notifications} n "
            "WHERE n.handler_name = 'hooks.deliveries'"
        )

    async def test_a_retry_has_the_same_id_and_the_new_secrets(
        self, make_outbox: MakeOutbox, clock: MovableClock
    ) -> None:
        async with receiving() as receiver:
            receiver.answers, secrets = [answer(500)], [SECRET]
            outbox = await hooks(make_outbox, lambda envelope: [Endpoint(receiver.url, list(secrets))], clock)
            await ship(outbox, 1)
            await outbox.drain()
            secrets.append(OTHER_SECRET)
            clock.advance("1m")
            await outbox.drain()

            first, second = receiver.requests
            assert first.headers["webhook-id"] == second.headers["webhook-id"]
            assert first.body == second.body
            for secret in (SECRET, OTHER_SECRET):
                Webhook(secret).verify(second.body, second.headers)
            await outbox.close()

    async def test_ordered_endpoints_wait_behind_a_failure(self, make_outbox: MakeOutbox, clock: MovableClock) -> None:
        async with receiving() as good, receiving() as failing:
            failing.answers = [answer(500)]
            found = [Endpoint(good.url, [SECRET]), Endpoint(failing.url, [SECRET])]
            outbox = await hooks(make_outbox, found, clock, ordered=True)
            await ship(outbox, *range(5))
            await outbox.drain()
            assert orders(good) == [0, 1, 2, 3, 4]
            assert orders(failing) == [0]
            clock.advance("1m")
            await outbox.drain()
            assert orders(failing) == [0, 0, 1, 2, 3, 4]
            await outbox.close()

    async def test_no_other_handler_sees_deliveries(self, make_outbox: MakeOutbox, look: Look) -> None:
        async with receiving() as one, receiving() as two:
            outbox, journal = await make_outbox(), Journal()
            outbox.handler(topic="orders", name="all-orders")(journal)
            for name, receiver in (("one", one), ("two", two)):
                found = [Endpoint(receiver.url, [SECRET])]
                outbox.add_handler(Webhooks(name=name, topic="orders", endpoints=found, allow=LOCAL, raw=True))
            await ship(outbox, 1, topic="orders")
            await outbox.drain()

            assert (orders(one), orders(two), len(journal)) == ([1], [1], 1)
            assert await look.states() == {"SUCCEEDED": 5}
            await outbox.close()

    async def test_a_removed_endpoint_gets_nothing(self, make_outbox: MakeOutbox, look: Look) -> None:
        async with receiving() as receiver:
            found = [[Endpoint(receiver.url, [SECRET], "gone")], []]
            outbox = await hooks(make_outbox, lambda envelope: found.pop(0))
            await ship(outbox, 1)
            await outbox.drain()

            (row,) = await deliveries(look)
            assert row["state"] == "DEAD"
            assert "no longer returns endpoint 'gone'" in row["errors"]
            assert receiver.connections == 0
            assert [row["event_type"] for row in await look.events()] == ["OrderShipped", "outboxio.WebhookDelivery"]


@pytest.mark.above_statements
class TestFailures:
    async def test_410_disables_the_endpoint_once(
        self, make_outbox: MakeOutbox, look: Look, clock: MovableClock
    ) -> None:
        async with receiving() as receiver:
            receiver.answer = answer(410, "moved")
            outbox = await hooks(make_outbox, [Endpoint(receiver.url, [SECRET], "42")], clock)
            disabled: list[WebhookEndpointDisabled] = []

            @outbox.handler(WebhookEndpointDisabled, name="disable")
            async def disable(envelope: EventEnvelope[WebhookEndpointDisabled]) -> None:
                disabled.append(envelope.event)

            await ship(outbox, 1)
            await outbox.drain()
            await ship(outbox, 2, 3)
            await outbox.drain()

            assert disabled == [WebhookEndpointDisabled("42", "the endpoint answered 410: moved")]
            assert len(receiver.requests) == 1
            states = [(row["state"], row["attempts"]) for row in await deliveries(look)]
            assert states == [("DEAD", 1), ("FAILED", 0), ("FAILED", 0)]
            await outbox.close()

    @pytest.mark.parametrize("takes_a_later_event", [True, False])
    async def test_only_uninterrupted_failures_disable_an_endpoint(
        self, make_outbox: MakeOutbox, look: Look, clock: MovableClock, takes_a_later_event: bool
    ) -> None:
        async with receiving() as receiver:
            receiver.answers = [answer(500), *[OK] * takes_a_later_event, answer(500)]
            retry = RetryPolicy(max_attempts=2, base="1m")
            outbox = await hooks(make_outbox, [Endpoint(receiver.url, [SECRET])], clock, retry=retry)
            await ship(outbox, 1)
            await outbox.drain()
            clock.advance("50s")
            await ship(outbox, *[2] * takes_a_later_event)
            await outbox.drain()
            clock.advance("30s")
            await outbox.drain()

            assert "DEAD" in await look.states()
            disabled = [row for row in await look.events() if row["event_type"] == "WebhookEndpointDisabled"]
            assert len(disabled) == (not takes_a_later_event)
            await outbox.close()

    @pytest.mark.parametrize(("status", "retry_after", "seconds"), [
        (429, "120", 120), (503, "999999", 3600), (429, "soon", 5), (500, "120", 5), (503, "-1", 5),
    ])  # fmt: skip
    async def test_retry_after_of_a_busy_endpoint_is_respected(
        self, make_outbox: MakeOutbox, look: Look, clock: MovableClock, status: int, retry_after: str, seconds: int
    ) -> None:
        async with receiving() as receiver:
            receiver.answer = answer(status, Retry_After=retry_after)
            outbox = await hooks(
                make_outbox, [Endpoint(receiver.url, [SECRET])], clock, retry=RetryPolicy(base=5, jitter=0)
            )
            await ship(outbox, 1)
            await outbox.drain()

            record = (await outbox.admin.list(handler="hooks.deliveries"))[0]
            assert record.next_retry_at - clock() == timedelta(seconds=seconds)
            assert record.attempts == 1
            await outbox.close()

    async def test_a_redirect_is_a_failure_and_is_not_followed(self, make_outbox: MakeOutbox, look: Look) -> None:
        async with receiving() as receiver, receiving() as elsewhere:
            receiver.answer = answer(307, Location=elsewhere.url)
            outbox = await hooks(make_outbox, [Endpoint(receiver.url, [SECRET])])
            await ship(outbox, 1)
            await outbox.drain()
            assert elsewhere.connections == 0
            assert [row["state"] for row in await deliveries(look)] == ["FAILED"]
            await outbox.close()

    async def test_an_endless_answer_is_cut_off(self, make_outbox: MakeOutbox, look: Look) -> None:
        async with receiving() as receiver:
            endless = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 20_000
            receiver.answer = endless
            outbox = await hooks(make_outbox, [Endpoint(receiver.url, [SECRET])])
            await ship(outbox, 1)
            await outbox.drain()
            assert await look.states() == {"SUCCEEDED": 2}
            await eventually(lambda: receiver.open == 0)

    async def test_an_unresponsive_endpoint_occupies_four_requests(self, make_outbox: MakeOutbox, look: Look) -> None:
        async with receiving() as good, receiving() as silent:
            silent.answer = None
            found = [Endpoint(silent.url, [SECRET], "silent"), Endpoint(good.url, [SECRET], "good")]
            outbox = await hooks(make_outbox, found, concurrency=8, settings=Settings(shutdown_timeout=0.1))
            await ship(outbox, *range(20))

            async def the_others_wait() -> bool:
                return [row["attempts"] for row in await deliveries(look) if row["state"] == "FAILED"] == [0] * 16

            async with outbox.running():
                await eventually(lambda: len(good.requests) == 20)
                await eventually(the_others_wait)
                await eventually(lambda: len(silent.requests) >= 4)
                assert len(silent.requests) == 4

    async def test_bad_endpoints_delay_no_event_of_others(self, database_url: str) -> None:
        found = await latencies(database_url, 200, 1000.0, endpoints=20, dead=2, slow=2, watched=16)
        assert len(found) == 160

    async def test_a_failing_endpoint_gets_one_probing_delivery(
        self, make_outbox: MakeOutbox, look: Look, clock: MovableClock
    ) -> None:
        async with receiving() as receiver:
            receiver.answer = answer(500)
            outbox = await hooks(make_outbox, [Endpoint(receiver.url, [SECRET])], clock)
            await ship(outbox, 1, 2)
            await outbox.drain()
            assert len(receiver.requests) == 2
            await ship(outbox, *range(50))
            await outbox.drain()
            assert len(receiver.requests) == 2
            assert [row["attempts"] for row in await deliveries(look)] == [1, 1, *[0] * 50]
            await outbox.close()


@pytest.mark.above_statements
class TestDisabling:
    RETRY = RetryPolicy(max_attempts=2, base="1m")

    @staticmethod
    async def _disabled(look: Look) -> int:
        return sum(row["event_type"] == "WebhookEndpointDisabled" for row in await look.events())

    async def test_a_restart_does_not_disable_a_working_endpoint(
        self, make_outbox: MakeOutbox, look: Look, clock: MovableClock
    ) -> None:
        async with receiving() as receiver:
            receiver.answers, found = [answer(500), OK, answer(500)], [Endpoint(receiver.url, [SECRET])]
            outbox = await hooks(make_outbox, found, clock, retry=self.RETRY)
            await ship(outbox, 1)
            await outbox.drain()
            clock.advance("30s")
            await ship(outbox, 2)
            await outbox.drain()
            await outbox.close()
            outbox = await hooks(make_outbox, found, clock, retry=self.RETRY)
            clock.advance("1m")
            await outbox.drain()

            assert await look.states() == {"DEAD": 1, "SUCCEEDED": 3}
            assert await self._disabled(look) == 0
            await outbox.close()

    async def test_lookup_errors_disable_no_endpoint(
        self, make_outbox: MakeOutbox, look: Look, clock: MovableClock
    ) -> None:
        found = [[Endpoint("https://a.example", [SECRET])]]
        outbox = await hooks(make_outbox, lambda envelope: found.pop(), clock, retry=self.RETRY)
        await ship(outbox, 1)
        await outbox.drain()
        clock.advance("2m")
        await outbox.drain()

        assert await look.states() == {"DEAD": 1, "SUCCEEDED": 1}
        assert await self._disabled(look) == 0
        await outbox.close()

    async def test_handlers_of_all_events_get_no_deliveries(
        self, make_outbox: MakeOutbox, look: Look, clock: MovableClock
    ) -> None:
        async with receiving() as receiver:
            receiver.answer = answer(410)
            outbox, journal = await make_outbox(clock=clock), Journal()
            outbox.handler(Event, name="audit")(journal)
            for name in ("one", "two"):
                found = [Endpoint(receiver.url, [SECRET], "a")]
                types = [OrderShipped, WebhookEndpointDisabled]
                outbox.add_handler(Webhooks(name=name, types=types, endpoints=found, allow=LOCAL))
            await ship(outbox, 1)
            for _ in range(3):
                await outbox.drain()
                clock.advance("1h")

            assert len(receiver.requests) == 2
            assert [envelope.event_type for envelope in journal.envelopes] == [
                "OrderShipped", "WebhookEndpointDisabled", "WebhookEndpointDisabled",
            ]  # fmt: skip
            await outbox.close()


async def test_endpoints_with_the_same_url_are_merged_with_all_secrets(make_outbox: MakeOutbox) -> None:
    async with receiving() as receiver:
        found = [Endpoint(receiver.url, [SECRET]), Endpoint(receiver.url, iter([OTHER_SECRET, SECRET]))]  # type: ignore[arg-type]
        outbox = await hooks(make_outbox, found)
        await ship(outbox, 1)
        await outbox.drain()
        (request,) = receiver.requests
        for secret in (SECRET, OTHER_SECRET):
            Webhook(secret).verify(request.body, request.headers)
        await outbox.close()


def test_two_urls_with_the_same_id_are_refused() -> None:
    found = [Endpoint("https://a.example", [SECRET], "1"), Endpoint("https://b.example", [SECRET], "1")]
    with pytest.raises(ConfigurationError, match="two URLs for the id '1'"):
        Webhooks(name="hooks", types=[OrderShipped], endpoints=found)


@pytest.mark.parametrize(("option", "value", "message"), [
    ("endpoints", "https://a.example", "expected Endpoint objects"), ("allow", "10.0.0.0/8", "is a string"),
    ("allow", ["http://a"], "expected networks"), ("time_out", 3, "did you mean 'timeout'"),
    ("timeout", "soon", "timeout"),
])  # fmt: skip
def test_meaningless_options_are_refused(option: str, value: Any, message: str) -> None:
    options: Any = {"endpoints": [], option: value}
    with pytest.raises(ConfigurationError, match=message):
        Webhooks(name="hooks", types=[OrderShipped], **options)


@pytest.mark.parametrize(("secrets", "id", "message"), [
    (SECRET, None, "a list"), ([], None, "at least one"), (["whsec_%"], None, "base64"), ([SECRET], 7, "id"),
])  # fmt: skip
def test_an_invalid_endpoint_is_named_without_its_secrets(secrets: Any, id: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        Endpoint("https://a.example/t0ken", secrets, id)
    assert SECRET not in str(raised.value)
    for url in ("https://a.example/t0ken", "https://a.example?t0ken", "https://me:t0ken@a.example/"):
        assert repr(Endpoint(url, [SECRET], "1")) == "<Endpoint 1 of 'a.example'>"
