"""``outboxio.testing.drain``: an exception of a handler fails the test; everything else is as in ``outbox.drain``."""

from __future__ import annotations

import asyncio
import traceback
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Batch, DrainTimeout, EventEnvelope, HandlerFailed, RetryAfter, RetryPolicy
from outboxio.runs.failure_classifier import listening
from outboxio.testing import MovableClock, drain, memory_outbox
from tests.kit.app import Emit, MoneyDeposited, eventually, hang

Deposited = EventEnvelope[MoneyDeposited]


async def test_a_failing_assert_in_a_handler_fails_the_test() -> None:
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Deposited) -> None:
            assert envelope.event.amount == 2, "this is the test's own assert"

        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(AssertionError, match="this is the test's own assert") as caught:
            await drain(outbox)

        frames = traceback.extract_tb(caught.value.__traceback__)
        assert (frames[-1].name, frames[-1].filename) == ("first", __file__)
        (note,) = [note for note in caught.value.__notes__ if note.startswith("raised by")]
        assert note.startswith("raised by handler 'first' for event ")
        assert note.endswith("(MoneyDeposited, attempt 1)")


async def test_everything_is_drained_first_and_retries_are_recorded_as_usual() -> None:
    clock, calls = MovableClock(), list[int]()
    async with memory_outbox(clock=clock) as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Deposited) -> None:
            calls.append(int(envelope.event.amount))
            if envelope.event.amount == 1 and envelope.attempt == 1:
                raise ConnectionError("down")

        await outbox.executor.execute(Emit((1, 2, 3)))
        with pytest.raises(ConnectionError, match="down"):
            await drain(outbox)

        assert sorted(calls) == [1, 2, 3]
        counts = await outbox.admin.counts()
        assert (counts["FAILED"], counts["SUCCEEDED"]) == (1, 2)
        clock.advance("1m")
        assert (await drain(outbox)).succeeded == 1


async def test_several_failures_are_raised_as_an_exception_group() -> None:
    raised: list[BaseException] = []
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Deposited) -> None:
            raised.append(ValueError(int(envelope.event.amount)))
            raise raised[-1]

        @outbox.handler(MoneyDeposited, name="second", delivery="transactional")
        async def second(envelope: Deposited) -> None:
            raised.append(LookupError(int(envelope.event.amount)))
            raise raised[-1]

        await outbox.executor.execute(Emit((1, 2)))
        with pytest.raises(ExceptionGroup, match="4 runs of handlers failed") as caught:
            await drain(outbox)

    assert {id(error) for error in caught.value.exceptions} == {id(error) for error in raised}


async def test_an_exception_raised_twice_is_reported_once() -> None:
    always = ValueError("the same")
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Deposited) -> None:
            raise always

        await outbox.executor.execute(Emit((1, 2)))
        with pytest.raises(ValueError, match="the same") as caught:
            await drain(outbox)

    assert caught.value is always
    assert len(always.__notes__) == 1


async def test_every_error_that_ends_a_run_is_raised() -> None:
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="at-most-once", delivery="at_most_once")
        async def once(envelope: Deposited) -> None:
            raise ZeroDivisionError

        @outbox.handler(MoneyDeposited, name="slow", timeout="10ms")
        async def slow(envelope: Deposited) -> None:
            await hang()

        @outbox.handler(MoneyDeposited, name="later")
        async def later(envelope: Deposited) -> None:
            raise RetryAfter(60)

        @outbox.handler(MoneyDeposited, name="exits")
        async def exits(envelope: Deposited) -> None:
            raise SystemExit(3)

        @outbox.handler(MoneyDeposited, name="raises-in-batch", batch=Batch(max_wait=0))
        async def raises(envelopes: list[Deposited]) -> None:
            raise KeyError

        @outbox.handler(MoneyDeposited, name="returns", batch=Batch(max_wait=0))
        async def returns(envelopes: list[Deposited]) -> Any:
            return [(envelope, OverflowError()) for envelope in envelopes]

        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(BaseExceptionGroup) as caught:
            await drain(outbox)

    kinds = {type(error) for error in caught.value.exceptions}
    assert kinds == {ZeroDivisionError, TimeoutError, RetryAfter, SystemExit, KeyError, OverflowError}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_errors_that_would_stop_pytest_are_wrapped_in_a_group(error: BaseException) -> None:
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Deposited) -> None:
            raise error

        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(BaseExceptionGroup, match="1 run of a handler failed") as caught:
            await drain(outbox)

    assert caught.value.exceptions == (error,)


async def test_an_error_of_a_hook_is_raised() -> None:
    async def hook(envelope: Any, error: HandlerFailed) -> None:
        raise LookupError("in the hook")

    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(max_attempts=1), on_dead=hook)
        async def first(envelope: Deposited) -> None:
            raise ValueError("in the handler")

        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(ExceptionGroup) as caught:
            await drain(outbox)

    assert [str(error) for error in caught.value.exceptions] == ["in the handler", "in the hook"]


async def test_an_event_that_cannot_be_decoded_is_raised() -> None:
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Deposited) -> None: ...

        await outbox.inbox.receive(source="s", external_id="1", type="MoneyDeposited", payload={"amount": "1"})
        with pytest.raises(Exception, match="missing required field `wallet_id`"):
            await drain(outbox)


@pytest.mark.slow
async def test_a_timeout_has_the_earlier_failures_as_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="fails")
        async def fails(envelope: Deposited) -> None:
            raise ValueError("the cause")

        @outbox.handler(MoneyDeposited, name="hangs")
        async def hangs(envelope: Deposited) -> None:
            await asyncio.Event().wait()

        async def expires_after_the_failure(timeout: object) -> None:
            draining = asyncio.create_task(really_drain(None))
            await eventually(has_failed)
            draining.cancel()
            await asyncio.wait([draining])
            raise DrainTimeout("default")

        async def has_failed() -> bool:
            return (await outbox.admin.counts())["FAILED"] == 1

        really_drain = outbox.drain
        monkeypatch.setattr(outbox, "drain", expires_after_the_failure)
        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(DrainTimeout) as caught:
            await drain(outbox, timeout="1s")

    assert str(caught.value.__cause__) == "the cause"


async def test_failures_during_running_are_raised_by_drain() -> None:
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Deposited) -> None:
            raise ValueError(str(envelope.event.amount))

        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            await eventually(lambda: _failed(outbox, 1))
            assert (await drain(outbox)).failed == 0  # it failed earlier, and is in the log

            with listening(outbox) as failures:
                await outbox.executor.execute(Emit((2,)))
                await eventually(lambda: _failed(outbox, 2))
            assert [str(error) for error in failures.values()] == ["2"]


async def _failed(outbox: Any, number: int) -> bool:
    return bool((await outbox.admin.counts())["FAILED"] == number)


async def test_the_failures_of_another_outbox_are_not_raised() -> None:
    async with memory_outbox() as outbox, memory_outbox() as other:

        @other.handler(MoneyDeposited, name="first")
        async def first(envelope: Deposited) -> None:
            raise ValueError

        await other.executor.execute(Emit((1,)))
        with listening(outbox) as failures:
            assert (await other.drain()).failed == 1

    assert failures == {}


async def test_outbox_drain_still_counts_failures() -> None:
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Deposited) -> None:
            raise ValueError

        async with outbox.transaction("Deposit") as tx:
            tx.emit(MoneyDeposited(uuid4(), Decimal(1)))
        assert (await outbox.drain()).failed == 1
