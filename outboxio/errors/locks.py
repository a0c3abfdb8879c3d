"""Errors of keyed locks."""

from __future__ import annotations

from outboxio.errors.root import OutboxError


class KeyedLockError(OutboxError):
    """A keyed lock was not taken. ``key`` is the key, ``shard`` the shard."""

    def __init__(self, key: str, shard: str, told: str) -> None:
        self.key = key
        self.shard = shard
        super().__init__(f"lock {key!r} on shard {shard!r} {told}")


class LockTimeout(KeyedLockError, TimeoutError):
    """A keyed lock was not free within ``timeout`` seconds."""

    def __init__(self, key: str, shard: str, timeout: float) -> None:
        self.timeout = timeout
        super().__init__(
            key, shard, f"was not free within {timeout:g} s: a different task or process holds the lock; try later, "
            "give a longer timeout, or let the holder end its block sooner",
        )  # fmt: skip


class LockHeld(KeyedLockError):
    """A task asked for a keyed lock that the same task holds: the task would wait for itself."""

    def __init__(self, key: str, shard: str) -> None:
        super().__init__(
            key, shard, "is held by this task already, which would wait for itself: pass the lock on as an argument",
        )  # fmt: skip


class LockDeadlock(KeyedLockError):
    """Tasks of this process would wait for each other's keyed locks for ever. ``chain`` has the keys in order."""

    def __init__(self, key: str, shard: str, chain: tuple[str, ...]) -> None:
        self.chain = chain
        super().__init__(
            key, shard, f"is held by a task that waits for a lock of this task ({' -> '.join(map(repr, chain))}): "
            "take the locks in the same order in every task, by sorting the keys for example",
        )  # fmt: skip


class LockLost(KeyedLockError):
    """The session of a keyed lock has ended, and the lock with the session. A different process may hold the lock."""

    def __init__(self, key: str, shard: str) -> None:
        super().__init__(
            key, shard, "was lost with its session, and a different process may hold the lock: stop the work, and "
            "take the lock again",
        )  # fmt: skip
