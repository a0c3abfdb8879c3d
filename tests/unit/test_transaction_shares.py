"""Shares of transactions: the limit of a handler, the reserve for others, and the order."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from outboxio.runs.transaction_shares import Shares, TransactionShare

pytestmark = pytest.mark.virtual_time


def taken_alone(shares: Shares, claim: TransactionShare) -> int:
    """The transactions that a claim gets while no other claim waits."""
    number = 0
    while shares.take(claim):
        number += 1
    return number


@pytest.mark.parametrize(("total", "expected"), [(1, 1), (2, 2), (3, 3), (10, 10)])
def test_a_single_handler_has_everything(total: int, expected: int) -> None:
    shares = Shares(total, handlers=1)
    assert taken_alone(shares, shares.of_handler()) == expected


@pytest.mark.parametrize(("total", "expected"), [(1, 1), (2, 1), (3, 2), (10, 9)])
def test_handlers_leave_one_to_hooks(total: int, expected: int) -> None:
    shares = Shares(total, handlers=1, hooks=1)
    handler, hook = shares.of_handler(), shares.of_hook(is_expected=True)
    assert taken_alone(shares, handler) == expected
    assert shares.take(hook)


@pytest.mark.parametrize(("total", "handlers", "jobs"), [(1, 1, 1), (2, 1, 1), (3, 2, 2), (10, 9, 5)])
def test_handlers_leave_one_to_jobs_and_jobs_leave_their_shares(total: int, handlers: int, jobs: int) -> None:
    shares = Shares(total, handlers=1)
    handler, job = shares.of_handler(), shares.of_jobs()
    assert taken_alone(shares, handler) == handlers
    assert shares.take(job) == (total > 1)
    shares = Shares(total, handlers=1)
    handler, job = shares.of_handler(), shares.of_jobs()
    assert taken_alone(shares, job) == jobs
    assert shares.take(handler) == (total > 1)


@pytest.mark.parametrize(("total", "expected"), [(1, 1), (2, 1), (3, 1), (10, 5)])
def test_hooks_leave_half_to_handlers(total: int, expected: int) -> None:
    shares = Shares(total, handlers=1, hooks=1)
    handler, hook = shares.of_handler(), shares.of_hook(is_expected=True)
    assert taken_alone(shares, hook) == expected
    assert taken_alone(shares, handler) == max(1, total - expected)


def test_hooks_have_everything_without_transactional_handlers() -> None:
    shares = Shares(10, handlers=0, hooks=3)
    hooks = [shares.of_hook(is_expected=True) for _ in range(3)]
    assert taken_alone(shares, hooks[0]) == 9
    assert shares.take(hooks[1])


@pytest.mark.parametrize(("handlers", "first"), [(2, 8), (3, 8), (6, 5), (50, 5)])
def test_claimed_transactions_are_reserved_up_to_a_half(handlers: int, first: int) -> None:
    shares = Shares(10, handlers=handlers)
    claims = [shares.of_handler() for _ in range(handlers)]
    assert taken_alone(shares, claims[0]) == first
    assert sum(shares.take(claim) for claim in claims[1:]) == min(handlers - 1, 10 - first)


def test_a_released_claim_can_be_claimed_again() -> None:
    shares = Shares(10, handlers=2)
    slow, other = shares.of_handler(), shares.of_handler()
    assert taken_alone(shares, slow) == 8
    for _ in range(2):
        assert shares.take(other)
        assert not shares.take(slow)
        shares.release(other)
        assert not shares.take(slow)
    shares.release(slow)
    assert shares.take(slow)


# --- waiting for one -------------------------------------------------------------------------------


async def hold(shares: Shares, claim: TransactionShare, name: str, order: list[str], pause: float = 0) -> None:
    async with shares.hold(claim):
        order.append(name)
        await asyncio.sleep(pause)


async def test_waiters_take_turns_by_claim() -> None:
    shares, order = Shares(1, handlers=2), list[str]()
    slow, quick = shares.of_handler(), shares.of_handler()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(hold(shares, slow, "slow", order, 0.001))
        for _ in range(2):
            group.create_task(hold(shares, quick, "quick", order))

    assert order == ["slow", "slow", "quick", "slow", "quick", "slow", "slow"]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_cancelled_waiter_takes_nothing(is_late: bool) -> None:
    shares, order = Shares(1, handlers=1), list[str]()
    claim = shares.of_handler()
    shares.take(claim)
    waiting = asyncio.create_task(hold(shares, claim, "cancelled", order))
    await asyncio.sleep(0)
    if is_late:
        shares.release(claim)  # its turn has come, but it has not resumed yet
    waiting.cancel()
    await asyncio.wait([waiting])
    if not is_late:
        shares.release(claim)

    async with asyncio.timeout(10):
        await hold(shares, claim, "next", order)
    assert order == ["next"]


async def test_the_number_of_transactions_never_exceeds_the_limit() -> None:
    shares = Shares(3, handlers=4)
    claims, inside = [shares.of_handler() for _ in range(4)], Counter[str]()

    async def stay(claim: TransactionShare, number: int) -> None:
        async with shares.hold(claim):
            inside["now"] += 1
            inside["most"] = max(inside["most"], inside["now"])
            await asyncio.sleep(0.0005 * (number % 3))
            inside["now"] -= 1

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for number in range(100):
            task = group.create_task(stay(claims[number % 4], number))
            if number % 10 == 9:
                await asyncio.sleep(0)
                task.cancel()

    assert inside["most"] == 3
    assert taken_alone(shares, claims[0]) == 2, "all were released; one is reserved for others"
