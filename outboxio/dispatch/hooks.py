"""Hook runs: each hook run calls the hooks of a verdict, in a separate task.

Hook runs take no worker, so a slow hook delays no handler. Each hook run needs a transaction, so only a few hook runs
go on at the same time (``runs/transaction_shares.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outboxio.dispatch.scheduler import Scheduler
from outboxio.dispatch.settler import Settler
from outboxio.dispatch.state import DispatchState
from outboxio.dispatch.watchdog import Watchdog
from outboxio.invocation.invoker import HandlerInvoker
from outboxio.runs.run import STUCK, HookRun


class HookCaller:
    """Calls the hooks of a shard."""

    def __init__(
        self,
        state: DispatchState,
        scheduler: Scheduler,
        settler: Settler,
        invoker: HandlerInvoker,
        watchdog: Watchdog,
        *,
        ended: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """``ended`` is called with each task of a hook run that has ended."""
        self.tasks: dict[asyncio.Task[None], None] = {}
        self._state = state
        self._scheduler = scheduler
        self._settler = settler
        self._invoker = invoker
        self._watchdog = watchdog
        self._ended = ended

    def call(self) -> None:
        """Start hook runs while transactions are free, a run of each handler in turn."""
        if not self._state.may_start(asyncio.get_running_loop().time()):
            return
        self._scheduler.hooks_came = False
        while (run := self._scheduler.next_hook()) is not None:
            run.task = asyncio.create_task(self._run(run), context=self._state.handlers_context.copy())
            self.tasks[run.task] = None
            run.task.add_done_callback(self._ended)

    async def _run(self, run: HookRun) -> None:
        assert run.task is not None
        if self._watchdog.timer is None:
            self._watchdog.watch()
        outcome = await self._invoker.call(run, run.task)
        if run.phase is STUCK:
            return self._watchdog.came_back(run)
        self._scheduler.leave_hook(run)
        if self._scheduler.has_hooks:
            self.call()
        self._settler.end(run, outcome)
