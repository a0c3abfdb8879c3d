"""The loop: drives rounds of something until it is stopped.

A service answers "do one round, and tell me how it went"; only here is anything waited for. A loop does not know what
it drives. It waits for a wake-up or the poll delay, goes on at once after a full round, and survives every error of
its service: logged, counted, retried with backoff.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from outboxio.backoff import jittered, pause_after
from outboxio.round import Round
from outboxio.waiting import Signal

logger = logging.getLogger(__name__)

QUICKEST_POLL = 0.02  # seconds
SHARE_OF_SILENCE = 4  # while it polls quickly, a loop waits a fourth of the time since it last found something
FOR_EVER = float("inf")


class Loop:
    """Runs one service's rounds."""

    def __init__(
        self,
        name: str,
        run_once: Callable[[], Awaitable[Round]],
        poll_delay: Callable[[], float],
        *,
        eager_for: Callable[[], float] = lambda: 0.0,
        quickest: float = QUICKEST_POLL,
        heard_within: float = FOR_EVER,
    ) -> None:
        """``eager_for``: poll quickly for so many seconds from the beginning, and from whenever something was found.

        Ever less, ``quickest`` at first. For ever, where nobody may wake it; or as long as a wake-up may take.
        ``heard_within``: what is found more seconds after the last wake-up was written by somebody who wakes nobody,
        and whoever has written once is likely to go on: poll quickly for ever after that, too. So may somebody who has
        been writing for long when it begins.
        """
        self.name = name
        self.errors = 0
        """How many rounds have failed so far."""
        self.failures = 0
        """How many rounds have failed in a row: 0 is healthy."""
        self.last_error: Exception | None = None
        self._run_once = run_once
        self._poll_delay = poll_delay
        self._eager_for = eager_for
        self._quickest = quickest
        self._heard_within = heard_within
        self._found_at = self._woken_at = float("-inf")
        self._unheard = heard_within < FOR_EVER
        self._signal = Signal()
        self._stopping = False

    def wake(self) -> None:
        """There may be work: begin the next round now, or right after the one under way."""
        self._signal.set()

    def stop(self) -> None:
        """End after the round under way."""
        self._stopping = True
        self._signal.set()

    async def run(self) -> None:
        """Drive rounds until :meth:`stop`. Whoever begins expects to find something soon."""
        self._found_at = asyncio.get_running_loop().time()
        while not self._stopping:
            pause = await self._round()
            if pause > 0 and not self._stopping and await self._signal.wait(pause):
                self._woken_at = asyncio.get_running_loop().time()

    async def _round(self) -> float:
        """One round; the seconds to wait after it, 0 for none."""
        try:
            result = await self._run_once()
        except Exception as error:
            return self._failed(error)
        if self.failures:
            logger.info("%s works again after %d failed rounds", self.name, self.failures)
            self.failures = 0
        now = asyncio.get_running_loop().time()
        if result.found:
            self._found_at = now
            self._unheard = now - self._woken_at > self._heard_within
        return 0.0 if result.more else jittered(self._pause(now))

    def _pause(self, now: float) -> float:
        """The seconds until the next look, if nobody wakes it."""
        silence = now - self._found_at
        is_eager = self._unheard or silence < self._eager_for()
        return min(self._poll_delay(), max(self._quickest, silence / SHARE_OF_SILENCE) if is_eager else FOR_EVER)

    def _failed(self, error: Exception) -> float:
        self.errors += 1
        self.failures += 1
        self.last_error = error
        pause = pause_after(self.failures)
        # The first failure with its stack; the rest of one outage in a line each, and ever more rarely.
        logger.log(
            logging.ERROR if self.failures == 1 else logging.WARNING,
            "%s failed (%d in a row) and is tried again in %.1f s: %r", self.name, self.failures, pause, error,
            exc_info=error if self.failures == 1 else None,
            extra={"loop": self.name, "failures": self.failures},
        )  # fmt: skip
        return pause
