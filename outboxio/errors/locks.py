"""Errors of keyed locks."""

from __future__ import annotations

from outboxio.errors.root import OutboxError


class KeyedLockError(OutboxError):
    """A keyed lock was not taken, or not kept. ``key`` is the key, ``shard`` the shard."""

    def __init__(self, key: str, shard: str, told: str) -> None:
        self.key = key
        self.shard = shard
        super().__init__(f"lock {key!r} on shard {shard!r} {told}")


class LockTimeout(KeyedLockError, TimeoutError):
    """A keyed lock was not taken within ``timeout`` seconds. The block was not entered."""

    def __init__(self, key: str, shard: str, timeout: float, why: str) -> None:
        self.timeout = timeout
        super().__init__(key, shard, f"was not taken within {timeout:g} s: {why}")


class LockHeld(KeyedLockError):
    """A keyed lock was asked for inside its own block, which would wait for itself."""

    def __init__(self, key: str, shard: str) -> None:
        super().__init__(
            key, shard, "is held by the block around this call, which would wait for itself: pass the lock on as an "
            "argument, or start this task outside of the block",
        )  # fmt: skip


class LockLost(KeyedLockError):
    """A keyed lock ended with its session before its block did. A different process may have held the lock since."""

    def __init__(self, key: str, shard: str) -> None:
        super().__init__(
            key, shard, "was lost with its session before the block ended, and a different process may have held the "
            "lock since: check the work of the block, or do the work again under a new lock",
        )  # fmt: skip
