"""The pulse of a loop: does the loop still do rounds, or wait for the database?

The rules read what a loop keeps anyway, so the pulse costs a loop nothing.

A round may last for as long as the database needs: a slow statement, or a server that does not answer, is no reason to
restart a process. So a long round is looked at more closely: the frames of the suspended task show if the round is
inside ``outboxio/storage``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import FrameType
from typing import Any

from outboxio.loops.loop import Loop
from outboxio.support import machine

MOST_PAUSES = 3  # a loop that pauses for longer than so many of its own pauses has lost its timer
SHORTEST = 10.0  # seconds: shorter lateness is that of a busy event loop
LONGEST_ROUND = 30.0  # seconds: a longer round waits for the database, or for ever

_STORAGE = "outboxio.storage"


def age_of(loop: Loop, now: float) -> float | None:
    """The seconds since the end of the last round, by the event loop's clock; ``None`` before the first end."""
    return None if loop.ended == float("-inf") else max(0.0, now - loop.ended)


def is_late(loop: Loop, now: float) -> bool:
    """True if the loop has not begun a round for three times its pause, and for at least 10 s."""
    return loop.pause is not None and now - loop.ended > max(MOST_PAUSES * loop.pause, SHORTEST)


def is_long(loop: Loop) -> bool:
    """True if a round goes on for longer than 30 s."""
    return loop.pause is None and loop.task is not None and machine.monotonic() - loop.began > LONGEST_ROUND


def has_died(loop: Loop) -> bool:
    """True if the task of the loop has ended by an error, or was cancelled."""
    task = loop.task
    return task is not None and task.done() and (task.cancelled() or task.exception() is not None)


def waits_for_database(loop: Loop) -> bool:
    """True if a round goes on, and waits inside ``outboxio/storage``."""
    return loop.pause is None and loop.task is not None and _is_in_storage(loop.task)


def _is_in_storage(task: asyncio.Task[None]) -> bool:
    """A doubt must not end a process: an async context manager hides the frames below, and counts as the database."""
    try:
        modules = [str(frame.f_globals.get("__name__")) for frame in awaited_frames(task.get_coro())]
    except Exception:  # an awaitable of a driver may answer with any error
        return True
    return any(module.startswith(_STORAGE) for module in modules) or modules[-1:] == ["contextlib"]


def awaited_frames(coroutine: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of the calls that the coroutine awaits.

    The frames end at the first object that is no coroutine and no generator: a future, or an object without a frame
    that can be seen. An awaitable of the application may raise any error here.
    """
    waiting = coroutine
    while waiting is not None:
        frame = next(filter(None, (getattr(waiting, f"{kind}_frame", None) for kind in ("cr", "gi", "ag"))), None)
        if frame is None:
            return
        yield frame
        waiting = getattr(waiting, "cr_await", getattr(waiting, "gi_yieldfrom", getattr(waiting, "ag_await", None)))
