from __future__ import annotations

import time
from uuid import RFC_4122

from outboxio.ids import uuid7


def test_an_id_is_a_uuid7_of_the_present_moment() -> None:
    before = time.time_ns() // 1_000_000
    made = uuid7()
    after = time.time_ns() // 1_000_000
    assert (made.version, made.variant) == (7, RFC_4122)
    assert before <= made.int >> 80 <= after


def test_ids_are_distinct_and_sort_by_the_moment_at_which_they_were_made() -> None:
    ids = []
    for _ in range(5_000):
        ids.append(uuid7())
        # Their order is that of quarters of a microsecond.
        moment = time.time_ns()
        while time.time_ns() - moment < 300:
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
