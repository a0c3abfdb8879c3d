"""``rate=``: what it accepts, and how many runs start in any window, with many processes that join, leave and die."""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections import deque
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest

from outboxio import Rate
from outboxio.dispatch.rates import ClusterGate, Gate, KeyGate
from outboxio.errors import RegistrationError, SettingsError
from outboxio.handlers.described import DEFAULT_OPTIONS, changed
from outboxio.handlers.options import Batch, checked_options
from outboxio.support.clock import from_micros

SEEDS = 8
SECONDS = 30.0


# --- the option ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate", "interval"),
    [
        ("100/s", Rate(100), 0.01), ("10/min", Rate(10, per="1m"), 6.0), ("5 / 30s", Rate(5, per="30s"), 6.0),
        ("3600/hour", Rate(3600, per="1h"), 1.0), ("1/day", Rate(1, per="1d"), 86400.0),
        ("20/100ms", Rate(20, per="100ms"), 0.005),
    ],
)  # fmt: skip
def test_a_rate_is_written_in_its_usual_form(text: str, rate: Rate, interval: float) -> None:
    parsed = checked_options("h", "here", {"rate": text}).rate
    assert parsed == rate
    assert rate.interval == interval
    assert checked_options("h", "here", {"rate": str(rate)}).rate == rate


@pytest.mark.parametrize("value", ["100", "/s", "x/s", "0/s", "-1/s", "1/0s", "1/month", 100, "1.5/s"])
def test_an_invalid_rate_is_refused(value: Any) -> None:
    with pytest.raises(RegistrationError, match=r"has rate=.*expected text such as '100/s'"):
        checked_options("h", "here", {"rate": value})


@pytest.mark.parametrize("values", [{"limit": 0}, {"limit": True}, {"limit": 1, "per": 0}, {"limit": 1, "burst": 0}])
def test_a_rate_with_impossible_values_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Rate(**values)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"rate_per_key": True, "ordered": True}, "add for example rate='10/s'"),
        ({"rate": "1/s", "rate_per_key": True}, "add ordered=True"),
        ({"rate": "1/s", "rate_per_key": True, "ordered": True, "batch": Batch()}, "remove one of them"),
    ],
)
def test_a_rate_per_key_needs_keys(options: Any, fix: str) -> None:
    with pytest.raises(RegistrationError, match=fix):
        checked_options("h", "here", options)


def test_the_default_burst_is_a_fifth_of_a_second() -> None:
    assert [Rate(100).most_at_once, Rate(1).most_at_once, Rate(100, burst=3).most_at_once] == [20, 1, 3]


def test_a_rate_is_shown_as_it_is_written() -> None:
    assert changed(checked_options("h", "here", {"rate": "10/min"}), DEFAULT_OPTIONS) == {"rate": "10/m"}


# --- the gates -------------------------------------------------------------------------------------


class Cluster:
    """The row of a handler, and the starts of all processes. A statement takes 1 to 10 ms."""

    def __init__(self, seed: int, partitions: int = 16) -> None:
        self.random = random.Random(seed)
        self.next_us = self.statements = 0
        self.partitions = partitions
        self.starts: list[float] = []
        self.fails = 0.0

    async def reserve(self, namespace: str, handler_name: str, *, earliest: int, span: int) -> int:
        self.statements += 1
        await asyncio.sleep(self.random.uniform(0.0005, 0.005))
        first = max(self.next_us, earliest)
        self.next_us = first + span
        await asyncio.sleep(self.random.uniform(0.0005, 0.005))
        if self.random.random() < self.fails:
            raise ConnectionResetError("the server has gone away")
        return first


class Process:
    """A queue with a gate, whose runs take no time."""

    def __init__(self, cluster: Cluster, rate: Rate, *, slots: int = 4, per_key: bool = False) -> None:
        self.cluster, self.ready, self.limit, self.quota = cluster, deque[Any](), 1, SimpleNamespace(allowed=1)
        self.handler, self.spec, self.slots = SimpleNamespace(name="h"), SimpleNamespace(names=["h"]), slots
        core: Any = SimpleNamespace(
            scheduler=SimpleNamespace(enlist=lambda queue: None, call=self.work),
            in_flight=SimpleNamespace(cursors=SimpleNamespace(of=lambda queue: range(self.slots))),
            partitions=SimpleNamespace(active=lambda name: cluster.partitions),
            setup=SimpleNamespace(
                clock=lambda: from_micros(10**15 + round(asyncio.get_running_loop().time() * 1e6)), namespace="app",
                database=SimpleNamespace(rates=cluster),
            ),
        )  # fmt: skip
        queue: Any = self
        self.gate: Gate = (KeyGate if per_key else ClusterGate)(core, queue, rate)

    def allow(self, number: int) -> None:
        self.limit = 0 if self.gate.is_closed else number

    def add(self, *keys: str) -> None:
        self.ready += [SimpleNamespace(key=key) for key in keys]
        self.work()

    def work(self) -> None:
        while self.ready and self.limit and self.gate.may_start():
            self.gate.take()
            self.cluster.starts.append(asyncio.get_running_loop().time())

    def die(self) -> None:
        self.ready.clear()
        self.gate.stop()


def most_in(starts: list[float], window: float) -> int:
    return max((bisect_left(starts, at + window - 1e-6) - n for n, at in enumerate(starts)), default=0)


def least_in(starts: list[float], window: float, begin: float, end: float) -> int:
    times = [begin + n * 0.1 for n in range(int((end - begin - window) * 10))]
    return min(bisect_left(starts, at + window) - bisect_left(starts, at) for at in times)


async def play(cluster: Cluster, rate: Rate, number: int, *, skewed: bool, churn: bool) -> None:
    """Keep rows ready in ``number`` processes; with ``churn``, processes die and others join."""
    loop, chance = asyncio.get_running_loop(), cluster.random
    processes = [Process(cluster, rate, slots=cluster.partitions // number) for _ in range(number)]
    end, change_at = loop.time() + SECONDS, loop.time() + 6.0
    while loop.time() < end:
        for index, process in enumerate(processes):
            target = 400 if not skewed else (400 if index == 0 else chance.randint(0, 1))
            process.add(*["k"] * (target - len(process.ready)))
        if churn and loop.time() >= change_at:
            change_at += 6.0
            index = chance.randrange(number)
            processes[index].die()
            processes[index] = Process(cluster, rate, slots=cluster.partitions // number)
        await asyncio.sleep(0.05)
    for process in processes:
        process.die()


@pytest.mark.virtual_time
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("number", [1, 4, 8])
async def test_the_cluster_reaches_the_rate_without_exceeding_it(number: int, skewed: bool) -> None:
    for seed in range(SEEDS // 4):
        cluster, begin = Cluster(seed), asyncio.get_running_loop().time()
        await play(cluster, Rate(100, burst=20), number, skewed=skewed, churn=number > 1 and bool(seed % 2))
        assert least_in(cluster.starts, 10, begin + 1, begin + SECONDS) >= 970
        for window in (0.1, 1.0, 10.0):
            assert most_in(cluster.starts, window) <= 100 * window + 20


@pytest.mark.virtual_time
async def test_no_window_has_more_runs_than_the_rate_and_the_burst() -> None:
    for seed in range(SEEDS):
        cluster = Cluster(seed)
        chance = random.Random(seed)
        rate = Rate(chance.choice([1, 7, 100, 3000]), burst=chance.choice([None, 1, 5, 400]))
        cluster.fails = chance.choice([0, 0.2])
        number, skewed = chance.choice([1, 2, 8]), chance.random() < 0.5
        await play(cluster, rate, number, skewed=skewed, churn=chance.random() < 0.7)
        for window in (0.05, 0.5, 1.0, 3.0, 10.0):
            most = ceil(window / rate.interval - 1e-6) + rate.most_at_once
            assert most_in(cluster.starts, window) <= most, (seed, rate, window)


@pytest.mark.virtual_time
async def test_a_crash_costs_a_quarter_of_a_second_of_the_rate() -> None:
    cluster, rate = Cluster(1), Rate(100)
    first, second = Process(cluster, rate, slots=16), Process(cluster, rate, slots=16)
    first.add(*["k"] * 400)
    await asyncio.sleep(0.02)
    first.die()
    second.add("k")
    count = len(cluster.starts)
    await asyncio.sleep(0.26)
    assert len(cluster.starts) == count + 1


@pytest.mark.virtual_time
async def test_an_invalid_rate_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(1)
    cluster.fails = 1
    process = Process(cluster, Rate(100), slots=16)
    process.add("k")
    await asyncio.sleep(60)
    assert cluster.statements > 3
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    cluster.fails = 0
    await asyncio.sleep(60)
    assert len(cluster.starts) == 1
    process.die()


@pytest.mark.virtual_time
async def test_a_queue_reports_when_its_rate_delays_rows() -> None:
    process = Process(Cluster(1), Rate(100), slots=16)
    process.add("k")
    await asyncio.sleep(0.1)
    assert not process.gate.holds_back, "nothing waits"
    process.add(*["k"] * 100)
    await asyncio.sleep(0.5)
    assert process.gate.holds_back
    await asyncio.sleep(3)
    assert not process.ready
    assert not process.gate.holds_back


@pytest.mark.virtual_time
async def test_each_key_has_a_rate_without_a_statement() -> None:
    cluster = Cluster(1)
    process = Process(cluster, Rate(10, burst=2), per_key=True)
    process.gate.reset()
    for number in range(200):
        process.add(*(["hot"] * (5 - len(process.ready))))
        if number % 100 == 99:
            process.add("cold")
        await asyncio.sleep(0.05)
    assert len(cluster.starts) == pytest.approx(100 + 2, abs=3)
    assert most_in(cluster.starts, 1.0) <= 10 + 2 + 1  # and a row of the other key
    assert cluster.statements == 0


@pytest.mark.virtual_time
async def test_a_keys_burst_starts_at_zero_after_acquiring_a_slot() -> None:
    cluster = Cluster(1)
    process = Process(cluster, Rate(10, burst=5), per_key=True)
    process.gate.reset()
    process.add(*["k"] * 10)
    await asyncio.sleep(0.05)
    assert cluster.starts == []
    await asyncio.sleep(1.0)
    assert len(cluster.starts) == 10
