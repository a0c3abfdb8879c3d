"""The mark ``virtual_time``: an event loop whose clock jumps to the next timer while nothing else is ready.

A sleep of an hour takes no time, and timers fire in their order. Each reading is a microsecond later than the reading
before, so that two times are never equal, and a loop over ``monotonic()`` ends. The clocks of the engine
(``outboxio.support.machine``) are the loop's too. Such a clock is only for tests without I/O, without threads and
without a blocked event loop: it jumps while a thread or a server is still at work.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from outboxio.support import machine

#: Seconds without any event after which a test without timers fails: nothing inside the loop can wake it any more.
STUCK_AFTER = 1.0


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of a test: with virtual time for the mark ``virtual_time``, otherwise the usual one."""
    mark = item.get_closest_marker("virtual_time")
    is_virtual = mark is not None and mark.args != (False,)
    return {"virtual": VirtualTimeLoop} if is_virtual else {"real": asyncio.new_event_loop}


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]  # one class per platform
    """Poll instead of waiting, and advance the clock by the skipped seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = time.monotonic()

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(STUCK_AFTER if timeout is None else 0)
        if timeout is not None and not ready:
            self.now += max(timeout, 0.0)
        elif not ready:
            raise RuntimeError("the test waits for something that never happens: nothing is ready, and no timer is set")
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time; the engine's clocks are its clock from its creation until it is closed."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)
        self._former_machine = machine.use(_Machine(self))  # type: ignore[arg-type]  # the rest is by __getattr__

    def time(self) -> float:
        self._jumping.now += 1e-6
        return self._jumping.now

    def close(self) -> None:
        if not self.is_closed():
            machine.use(self._former_machine)
        super().close()


class _Machine:
    """This machine, except for its monotonic clocks."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self.monotonic = self.perf_counter = loop.time
        self.steady_ns = lambda: int(loop.time() * 1e9)

    def __getattr__(self, name: str) -> Any:
        return getattr(machine.REAL, name)


def timers() -> int:
    """The number of timers of the running event loop."""
    scheduled: list[asyncio.TimerHandle] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]  # its own
    return len([timer for timer in scheduled if not timer.cancelled()])
