"""One of three shards becomes unresponsive: the others are not affected, and it recovers soon after its network.

``OUTBOXIO_TEST_FULL_SIZE=1`` checks the documented figures under a lasting load; ``-s`` prints the figures.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest

from outboxio import EventEnvelope, Outbox, Settings
from tests.kit.app import Look, MoneyDeposited, eventually
from tests.kit.proxy import Proxy, proxy_to
from tests.kit.servers import DIALECTS, Server
from tests.kit.size import FULL

SHARDS = ("first", "second", "third")
BEFORE = 10.0 if FULL else 1.0  # seconds of load
SILENCE = 30.0 if FULL else 4.0  # seconds, several times as long as the locks are proven
HEARTBEAT = "5s" if FULL else "500ms"
PAUSE = 0.01 if FULL else 0.02  # seconds between two actions on a shard


async def measure_pauses(longest: list[float]) -> None:
    """Append each pause of this process that is longer than those before: busy machines stop it for seconds."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(PAUSE)
        longest.append(max(longest[-1], time.monotonic() - before - PAUSE))


class Handled:
    """How many events of each shard were handled, and how late each was."""

    def __init__(self, outbox: Outbox) -> None:
        self.numbers = Counter[str]()
        self.delays = list[float]()
        outbox.handler(MoneyDeposited, name="receipt")(self._handle)

    async def _handle(self, envelope: EventEnvelope[MoneyDeposited]) -> None:
        self.numbers[envelope.shard] += 1
        self.delays.append(time.monotonic() - float(envelope.event.amount))


@pytest.fixture
async def third(postgres_url: str, tmp_path: Path) -> AsyncIterator[tuple[dict[str, str], Proxy]]:
    """The URLs of three databases on one server, and the proxy of the third."""
    server = Server("postgres", 0, postgres_url, "the same")
    async with AsyncExitStack() as stack:
        urls = [postgres_url]
        urls += [stack.enter_context(DIALECTS["postgres"].fresh_database(server, tmp_path)) for _ in range(2)]
        proxy = await stack.enter_async_context(proxy_to(urls[-1]))
        yield dict(zip(SHARDS, [*urls[:-1], proxy.url], strict=True)), proxy


async def deposit(outbox: Outbox, shard: str, until: float) -> int:
    """Execute actions on a shard until the given time; return how many."""
    number = 0
    while time.monotonic() < until:
        async with outbox.transaction("Deposit", shard=shard) as tx:
            tx.emit(MoneyDeposited(uuid4(), Decimal(time.monotonic())))
        number += 1
        await asyncio.sleep(PAUSE)
    return number


@pytest.mark.real_time("measures how long a shard takes to recover")
async def test_an_unresponsive_shard_disturbs_no_other_and_recovers(third: tuple[dict[str, str], Proxy]) -> None:
    urls, proxy = third
    async with Outbox(urls, namespace="app", settings=Settings(lock_heartbeat=HEARTBEAT)) as outbox:
        handled = Handled(outbox)
        await outbox.migrate()
        async with outbox.running():
            until = time.monotonic() + BEFORE
            before = await asyncio.gather(*(deposit(outbox, shard, until) for shard in SHARDS))
            await eventually(lambda: handled.numbers.total() == sum(before))
            handled.delays.clear()
            pauses = [0.0]
            measuring = asyncio.create_task(measure_pauses(pauses))

            proxy.stall()
            until = time.monotonic() + SILENCE
            meanwhile = await asyncio.gather(*(deposit(outbox, shard, until) for shard in SHARDS[:2]))
            expected = dict(zip(SHARDS, map(sum, zip(before, meanwhile, strict=False)), strict=False))
            await eventually(lambda: all(handled.numbers[shard] == number for shard, number in expected.items()))
            measuring.cancel()
            delays, kept = sorted(handled.delays), sum(meanwhile) / SILENCE / (sum(before[:2]) / BEFORE)

            proxy.resume()
            back_at = time.monotonic()
            after = await deposit(outbox, "third", back_at + 0.5)
            await eventually(lambda: handled.numbers["third"] == before[2] + after, timeout=10)
            recovered = time.monotonic() - back_at
    rows = await asyncio.gather(*(Look(url).states() for url in urls.values()))
    assert [set(states) for states in rows] == [{"SUCCEEDED"}] * 3

    p99 = delays[len(delays) * 99 // 100]
    print(
        f"\nthe other shards: {sum(before[:2]) / BEFORE:.0f} events/s before, {kept:.1%} of that in {SILENCE:g} s of "
        f"silence, p99 {p99 * 1000:.0f} ms; the third has caught up {recovered:.2f} s after its return"
    )
    assert delays[-1] < SILENCE / 2 + pauses[-1], "an event waited for a shard that is not its own"
    assert kept > (0.95 if FULL else 0.25), "a shard was slowed down"
    assert p99 < (0.5 if FULL else 2.0) + pauses[-1]
    assert recovered < 10
