from __future__ import annotations

import os
import time
from uuid import RFC_4122, UUID

import pytest

from outboxio.support import machine
from outboxio.support.ids import uuid7

RANDOM = (1 << 62) - 1


def test_an_id_is_a_uuid7_of_the_current_time() -> None:
    before = time.time_ns() // 1_000_000
    made = uuid7()
    after = time.time_ns() // 1_000_000
    assert (made.version, made.variant) == (7, RFC_4122)
    assert before <= made.int >> 80 <= after


def test_ids_are_distinct_and_sort_by_creation_time() -> None:
    ids = []
    for _ in range(5_000):
        ids.append(uuid7())
        # They are ordered by quarters of a microsecond.
        started = time.time_ns()
        while time.time_ns() - started < 300:
            pass
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids)


def test_the_fraction_of_a_millisecond_is_spread_over_12_bits() -> None:
    fractions = {uuid7().int >> 64 & 0xFFF for _ in range(20_000)}
    assert len(fractions) > 1_000
    assert max(fractions) > 0xE00


def test_62_bits_are_random() -> None:
    ones, zeros = 0, 0
    for _ in range(200):
        bits = uuid7().int & ((1 << 62) - 1)
        ones |= bits
        zeros |= ~bits
    assert ones & ((1 << 62) - 1) == zeros & ((1 << 62) - 1) == (1 << 62) - 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_other_ids_than_its_parent() -> None:
    uuid7()  # some random bits are left over
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(uuid7()).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    try:
        of_child, of_parent = UUID(os.read(reading, 36).decode()), uuid7()
    finally:
        os.close(reading)
        os.close(writing)

    assert of_child.int & RANDOM != of_parent.int & RANDOM


def test_ids_stay_ordered_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [uuid7() for _ in range(100)]
    real = time.time_ns
    monkeypatch.setattr(machine, "time_ns", lambda: real() - 3_600_000_000_000)
    after = [uuid7() for _ in range(10_000)]
    assert [*before, *after] == sorted({*before, *after})


def test_ids_of_the_same_time_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system's clock has ticks of 15 ms."""
    started = time.time_ns()
    monkeypatch.setattr(machine, "time_ns", lambda: started)
    ids = [uuid7() for _ in range(10_000)]
    assert ids == sorted(set(ids))
