"""Cutting the sessions of keyed locks."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from outboxio import KeyedLock
from outboxio.model.lock_name import LockName
from tests.kit.inside import connection_of
from tests.kit.server_actions import actions_on


async def end_session(url: str, lock: KeyedLock) -> None:
    """End the session of a lock, as an administrator would; on SQLite, remove the lock file."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        os.unlink(f"{parts.path}.locks/{LockName('app', 'lock', lock.key).text}")
        return
    connection = connection_of(lock)
    number = connection.get_server_pid() if hasattr(connection, "get_server_pid") else connection.thread_id()
    await actions_on(url).end([number])
