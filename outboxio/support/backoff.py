"""Pauses between retries: exponential, with jitter."""

from __future__ import annotations

from outboxio.support import machine

LARGEST_EXPONENT = 30  # 2 ** 30 s is longer than every limit


def jittered(seconds: float, jitter: float = 0.1) -> float:
    """``seconds``, varied at random between ``1 - jitter`` and ``1 + jitter`` times."""
    return seconds * machine.uniform(1 - jitter, 1 + jitter)


def pause_after(failures: int, *, first: float = 0.1, longest: float = 5.0) -> float:
    """The seconds that a loop waits after ``failures`` failures in a row, with a jitter of 0.25."""
    return jittered(min(first * 2 ** min(failures - 1, LARGEST_EXPONENT), longest), 0.25)
