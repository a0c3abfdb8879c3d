"""Find tasks, connections and locks that are left over after ``running()``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from urllib.parse import urlsplit

from tests.kit.app import Look, eventually
from tests.kit.server_actions import actions_on


class Leaks:
    """Compare the current state with the state at construction. Construct it before entering ``running()``."""

    def __init__(self, url: str) -> None:
        self._path = Path(urlsplit(url).path[1:]) if Look(url).is_file else None
        self._acts = actions_on(url)
        self._tasks = asyncio.all_tasks()

    async def nothing_is_left(self, connections: int = 0) -> None:
        """Assert that no task, lock or connection is left, except for those that the application's pool may keep."""
        # A wake-up that a commit has just caused is sent from a task that ends with the burst.
        await eventually(lambda: not [t for t in asyncio.all_tasks() if t.get_name() == "outboxio notifier"])
        left = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"
        if self._path is not None:
            assert self._open_files("test.db.locks") == [], "a cluster lock is left"
            return
        # The server detects a closed connection a little later.
        try:
            await eventually(lambda: self._sessions_are_gone(connections))
        except AssertionError:
            raise AssertionError(f"sessions are left: {await self._acts.sessions()}") from None

    async def _sessions_are_gone(self, connections: int) -> bool:
        return len(await self._acts.sessions()) <= connections and not await self._acts.locks()

    def _open_files(self, folder: str) -> list[str]:
        targets = []
        for descriptor in Path("/proc/self/fd").iterdir():
            try:
                targets.append(os.readlink(descriptor))
            except OSError:
                continue  # closed in the meantime
        return [target for target in targets if Path(target).parent.name == folder and self._is_here(target)]

    def _is_here(self, target: str) -> bool:
        assert self._path is not None
        return Path(target).parent.parent == self._path.parent
