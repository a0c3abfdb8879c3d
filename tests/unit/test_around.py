"""``around=``: a context manager around each run, which sees the error but cannot turn a failure into a success."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Batch, ConfigurationError, EventEnvelope, HandlerFailed, Outbox, RetryPolicy
from outboxio.testing import drain, memory_outbox
from tests.kit.app import Emit, MoneyDeposited, hang

Envelope = EventEnvelope[MoneyDeposited]

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


@asynccontextmanager
async def as_tenant(envelope: EventEnvelope[Any]) -> AsyncIterator[None]:
    token = tenant.set(f"tenant of {envelope.event.amount}")
    try:
        yield
    finally:
        tenant.reset(token)


async def test_the_context_surrounds_each_run_of_every_kind_of_handler() -> None:
    seen: list[str] = []
    async with memory_outbox(around=as_tenant) as outbox:

        @outbox.handler(MoneyDeposited, name="plain")
        async def plain(envelope: Envelope) -> None:
            seen.append(f"plain: {tenant.get()}")

        @outbox.handler(MoneyDeposited, name="in a thread")
        def in_a_thread(envelope: Envelope) -> None:
            seen.append(f"in a thread: {tenant.get()}")

        @outbox.handler(MoneyDeposited, name="transactional", delivery="transactional")
        async def transactional(envelope: Envelope) -> None:
            seen.append(f"transactional: {tenant.get()}")

        @outbox.handler(MoneyDeposited, name="batch", batch=Batch(max_wait=0))
        async def batch(envelopes: list[Envelope]) -> None:
            seen.append(f"batch of {len(envelopes)}: {tenant.get()}")

        await outbox.executor.execute(Emit((1, 2)))
        await drain(outbox)

    assert sorted(seen) == [
        "batch of 2: tenant of 1",
        *(f"{kind}: tenant of {n}" for kind in ("in a thread", "plain", "transactional") for n in (1, 2)),
    ]


async def test_the_context_sees_the_error_of_the_run_without_swallowing_it() -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def swallowing(envelope: EventEnvelope[Any]) -> AsyncIterator[None]:
        try:
            yield
        except ValueError as error:
            seen.append(str(error))

    async with memory_outbox(around=swallowing) as outbox:

        @outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(max_attempts=1))
        async def first(envelope: Envelope) -> None:
            raise ValueError("no")

        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(ValueError, match="no"):
            await drain(outbox)
        assert (await outbox.admin.counts())["DEAD"] == 1

    assert seen == ["no"]


async def test_the_timeout_of_a_run_includes_the_context() -> None:
    @asynccontextmanager
    async def slow(envelope: EventEnvelope[Any]) -> AsyncIterator[None]:
        await hang()
        yield

    async with memory_outbox(around=slow) as outbox:

        @outbox.handler(MoneyDeposited, name="first", timeout="50ms")
        async def first(envelope: Envelope) -> None: ...

        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(TimeoutError, match="ran longer than its timeout"):
            await drain(outbox)


async def test_the_context_surrounds_a_directly_consumed_message() -> None:
    seen: list[str] = []
    async with memory_outbox(around=as_tenant) as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Envelope) -> None:
            seen.append(tenant.get())

        await outbox.inbox.consume(source="shop", external_id="1", event=MoneyDeposited(uuid4(), Decimal(7)))

    assert seen == ["tenant of 7"]


async def test_the_context_does_not_surround_hooks() -> None:
    seen: list[str] = []

    async def on_dead(envelope: Envelope, error: HandlerFailed) -> None:
        seen.append(f"hook: {tenant.get()}")

    async with memory_outbox(around=as_tenant) as outbox:

        @outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(max_attempts=1), on_dead=on_dead)
        async def first(envelope: Envelope) -> None:
            seen.append(f"handler: {tenant.get()}")
            raise ValueError("no")

        await outbox.executor.execute(Emit((1,)))
        with suppress(ValueError):
            await drain(outbox)

    assert seen == ["handler: tenant of 1", "hook: nobody"]


async def no_context(envelope: EventEnvelope[Any]) -> None: ...


async def no_decorator(envelope: EventEnvelope[Any]) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def takes_nothing() -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("around", "reason"),
    [
        ("tenant", "'tenant'; expected a function of the envelope"),
        (no_context, "decorate it with contextlib.asynccontextmanager"),
        (no_decorator, "decorate it with contextlib.asynccontextmanager"),
        (takes_nothing, "is called with one envelope and takes no positional arguments"),
    ],
)
def test_a_function_that_returns_no_context_manager_is_refused(around: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Outbox("sqlite://", namespace="app", around=around)

    assert reason in str(caught.value)
