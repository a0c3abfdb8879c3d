"""The frames of a suspended coroutine, from the outermost call to the innermost call."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any


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
