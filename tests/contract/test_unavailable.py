"""A service that a handler needs is unavailable: no attempt is used, no row is written, and the circuit opens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Batch, EventEnvelope, InvalidRetryAfter, Outbox, Received, RetryPolicy, Settings, Unavailable
from tests.kit.app import Emit, Look, MoneyDeposited, eventually

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelope = EventEnvelope[MoneyDeposited]
ONCE = RetryPolicy(max_attempts=1)
"""A single attempt would end the notification DEAD."""


class Service:
    """A service that is unavailable for this many calls."""

    def __init__(self, away: int, retry_in: Any = None) -> None:
        self.away = away
        self.retry_in = retry_in
        self.calls: list[list[int]] = []
        self.attempts: list[int] = []
        self.times: list[float] = []
        self._lock = threading.Lock()

    def take(self, envelopes: list[Envelope]) -> None:
        with self._lock:
            self.calls.append([int(one.event.amount) for one in envelopes])
            self.attempts += [one.attempt for one in envelopes]
            self.away -= 1
            if self.away >= 0:
                raise Unavailable("the mail server is away", retry_in=self.retry_in)

    @property
    def taken(self) -> list[int]:
        return [amount for call in self.calls for amount in call]


async def untouched(look: Look) -> list[tuple[Any, ...]]:
    rows = await look.notifications()
    return [(row["state"], row["attempts"], row["updated_date"], row["next_retry_at"]) for row in rows]


KINDS: dict[str, dict[str, Any]] = {
    "single": {},
    "batch": {"batch": Batch(size=10, max_wait=0)},
    "ordered": {"ordered": True},
    "transactional": {"delivery": "transactional"},
    "transactional batch": {"delivery": "transactional", "batch": Batch(size=10, max_wait=0)},
    "synchronous": {},
}


def register(outbox: Outbox, service: Service, kind: str) -> None:
    options: dict[str, Any] = {"name": "mails", "retry": ONCE, **KINDS[kind]}
    if kind == "synchronous":

        @outbox.handler(MoneyDeposited, **options)
        def plain(envelope: Envelope) -> None:
            service.take([envelope])

    elif "batch" in kind:

        @outbox.handler(MoneyDeposited, **options)
        async def many(envelopes: list[Envelope]) -> None:
            service.take(envelopes)

    else:

        @outbox.handler(MoneyDeposited, **options)
        async def single(envelope: Envelope) -> None:
            service.take([envelope])


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unavailable_service_uses_no_attempt_and_writes_no_row(
    make_outbox: MakeOutbox, look: Look, kind: str
) -> None:
    outbox, service = await make_outbox(), Service(away=1000, retry_in="20ms")
    register(outbox, service, kind)
    for amount in range(4):
        async with outbox.transaction("deposit") as tx:
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key="k" if kind == "ordered" else amount)

    async with outbox.running():
        await eventually(lambda: len(service.calls) >= 2)
        before = await untouched(look)
        await eventually(lambda: len(service.calls) >= 6)
        assert await untouched(look) == before
        assert {state for state, *_ in before} <= {"PENDING", "BLOCKED"}
        assert {attempts for _, attempts, *_ in before} == {0}
        assert before[0][0] == "PENDING"
        service.away = 0
        await outbox.drain("30s")

    assert set(service.attempts) == {1}
    rows = await look.notifications()
    assert {(row["state"], row["attempts"], row["errors"] in ("[]", [])) for row in rows} == {("SUCCEEDED", 1, True)}
    statistics = outbox.statistics["default"].handlers["mails"]
    assert (statistics.succeeded, statistics.failed, statistics.dead) == (4, 0, 0)
    assert statistics.unavailable >= 6
    if kind == "ordered":
        assert service.taken[-4:] == [0, 1, 2, 3]
        assert set(service.taken[:-4]) == {0}


async def test_open_times_of_the_circuit_double_until_the_service_is_back(make_outbox: MakeOutbox) -> None:
    outbox, loop = await make_outbox(), asyncio.get_running_loop()
    times: list[float] = []

    @outbox.handler(MoneyDeposited, name="mails")
    async def mails(envelope: Envelope) -> None:
        times.append(loop.time())
        if len(times) <= 4:
            raise Unavailable("away")

    await outbox.execute(Emit((1,)))
    await outbox.drain()

    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert len(pauses) == 4
    for pause, least in zip(pauses, (0.1, 0.2, 0.4, 0.8), strict=True):
        assert pause >= least - 0.01


@pytest.mark.real_time("runs last long enough for others to start beside them")
async def test_a_single_run_probes_the_service_before_all_continue(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(concurrency=8))
    now = tries = most_tries = most = calls = 0

    @outbox.handler(MoneyDeposited, name="mails")
    async def mails(envelope: Envelope) -> None:
        nonlocal now, most, tries, most_tries, calls
        calls += 1
        now += 1
        most = max(most, now)
        is_away = calls <= 40
        is_try = is_away and calls > 8  # a run of the first 8 may end late, during the first probe
        tries += is_try
        most_tries = max(most_tries, tries)
        try:
            await asyncio.sleep(0.005)
            if is_away:
                raise Unavailable("away", retry_in=0.01)
        finally:
            now -= 1
            tries -= is_try

    await outbox.execute(Emit(tuple(range(60))))
    assert (await outbox.drain()).succeeded == 60

    assert (most, most_tries) == (8, 1)
    assert calls == 100


async def test_a_batch_returns_the_envelopes_whose_service_is_unavailable(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, calls = await make_outbox(), list[list[int]]()

    @outbox.handler(MoneyDeposited, name="mails", batch=Batch(size=10, max_wait=0), retry=ONCE)
    async def mails(envelopes: list[Envelope]) -> Any:
        calls.append([int(one.event.amount) for one in envelopes])
        if len(calls) == 1:
            return [(envelopes[3], Unavailable("away")), (envelopes[5], ValueError("bad"))]
        return None

    await outbox.execute(Emit(tuple(range(10))))
    await outbox.drain()

    assert calls == [list(range(10)), [3]]
    assert await look.states() == {"SUCCEEDED": 9, "DEAD": 1}


async def test_a_split_call_puts_back_all_remaining_rows(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, calls = await make_outbox(), list[list[int]]()

    @outbox.handler(MoneyDeposited, name="mails", batch=Batch(size=8, max_wait=0), retry=ONCE)
    async def mails(envelopes: list[Envelope]) -> None:
        calls.append([int(one.event.amount) for one in envelopes])
        if len(calls) == 1:
            raise ValueError("one of them is bad")
        if len(calls) == 3:
            raise Unavailable("away")

    await outbox.execute(Emit(tuple(range(8))))
    await outbox.drain()

    assert calls == [list(range(8)), [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    assert await look.states() == {"SUCCEEDED": 8}


async def test_an_at_most_once_run_ends_dead_and_opens_the_circuit(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, service = await make_outbox(settings=Settings(concurrency=1)), Service(away=1)
    outbox.handler(MoneyDeposited, name="mails", delivery="at_most_once")(lambda envelope: service.take([envelope]))

    await outbox.execute(Emit((1, 2, 3)))
    await outbox.drain()

    assert await look.states() == {"DEAD": 1, "SUCCEEDED": 2}
    assert len(service.calls) == 3


async def test_an_open_circuit_delays_neither_other_handlers_nor_leaving(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, service, others = await make_outbox(), Service(away=1000, retry_in="1h"), list[int]()

    @outbox.handler(MoneyDeposited, name="mails")
    async def mails(envelope: Envelope) -> None:
        service.take([envelope])

    @outbox.handler(MoneyDeposited, name="beside")
    async def beside(envelope: Envelope) -> None:
        others.append(int(envelope.event.amount))

    async with outbox.running():
        await outbox.execute(Emit((1,)))
        await eventually(lambda: len(service.calls) == 1)
        await outbox.execute(Emit(tuple(range(2, 50))))
        await eventually(lambda: len(others) == 49)
        health = await outbox.health()
        assert any("mails" in reason and "the mail server is away" in reason for reason in health.reasons)
        assert (health.status, health.live) == ("degraded", True)

    assert len(service.calls) == 1
    rows = await look.fetch("SELECT handler_name, state FROM {event_notifications} WHERE state <> 'SUCCEEDED'")
    assert {(row["handler_name"], row["state"]) for row in rows} == {("mails", "PENDING")}
    service.away = 0
    assert (await outbox.drain()).succeeded == 49


async def test_pausing_a_handler_with_an_open_circuit_returns_its_rows(make_outbox: MakeOutbox) -> None:
    outbox, service = await make_outbox(settings=Settings(handling_poll_delay="50ms")), Service(1000, retry_in="50ms")
    register(outbox, service, "single")
    await outbox.execute(Emit((1, 2)))
    async with outbox.running():
        await eventually(lambda: len(service.calls) > 1)
        await outbox.admin.pause("mails")
        dispatched = outbox.statistics["default"].live
        assert dispatched is not None
        await eventually(lambda: list(dispatched.paused) == ["mails"])
        await outbox.admin.skip([row.id for row in await outbox.admin.list()])
        service.away = 0
        await outbox.admin.unpause("mails")
        await outbox.drain("30s")
    assert outbox.statistics["default"].handlers["mails"].succeeded == 0


async def test_a_consumed_message_is_handled_later_without_an_attempt(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, service = await make_outbox(), Service(away=2)
    register(outbox, service, "single")
    message: dict[str, Any] = {"source": "billing", "external_id": "m-1", "event": MoneyDeposited(uuid4(), Decimal(1))}

    with pytest.raises(ExceptionGroup) as failed:
        await outbox.inbox.consume(**message)
    assert isinstance(failed.value.exceptions[0], Unavailable)

    consumption = await outbox.inbox.consume(**message, on_error="store")
    assert (consumption.status, consumption.stored, dict(consumption.failed)) == (Received.RECEIVED, ("mails",), {})
    [row] = await look.notifications()
    assert (row["state"], row["attempts"]) == ("PENDING", 0)
    assert (await outbox.drain()).succeeded == 1


@pytest.mark.parametrize("wrong", [0, -1, "soon", timedelta(0)])
def test_a_retry_time_is_a_duration_longer_than_zero(wrong: Any) -> None:
    with pytest.raises(InvalidRetryAfter, match=r"Unavailable\(retry_in="):
        Unavailable("away", retry_in=wrong)
