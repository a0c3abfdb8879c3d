"""Database errors, and errors about work that did not finish in time."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outboxio.errors.configuration import OutboxError


class DatabaseError(OutboxError):
    """The database or the network failed. ``__cause__`` is the driver's exception."""


class DatabaseUnavailable(DatabaseError):
    """A database is unreachable, unresponsive, or currently read-only."""

    _failed = "cannot be reached"

    def __init__(self, shard: str, where: str, reason: str) -> None:
        self.shard = shard
        self.where = where
        self.reason = reason
        super().__init__(f"shard {shard!r} at {where} {self._failed}: {reason}")


class PoolExhausted(DatabaseUnavailable):
    """No connection became free within the setting ``pool_timeout``. The action was not started.

    On SQLite the writing connection counts as a pool of size 1. ``held`` is how many seconds the longest-held
    connection has been in use; ``None`` for a user-supplied pool.
    """

    _failed = "has no free connection"

    def __init__(self, shard: str, where: str, *, size: int, in_use: int, held: float | None, timeout: float) -> None:
        self.size = size
        self.in_use = in_use
        self.held = held
        self.timeout = timeout
        longest = "" if held is None else f", one of them for {held:.1f} s"
        super().__init__(
            shard,
            where,
            f"{in_use} of at most {size} connections for actions are in use{longest}, and none was released within "
            f"pool_timeout, {timeout:g} s. An action holds its connection while it waits for another service or for a "
            "lock: shorten such actions, run fewer at once, or raise pool_timeout",
        )


class DrainTimeout(OutboxError, TimeoutError):
    """``drain`` timed out while work was still due."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        super().__init__(
            f"shard {shard!r} still has due work after the timeout of drain(): handlers take longer, or another "
            "process holds the locks and has not finished"
        )


class ShutdownError(OutboxError):
    """Outcomes could not be written within the setting ``shutdown_timeout``. The handlers will run again."""

    def __init__(self, notification_ids: Sequence[UUID]) -> None:
        self.notification_ids = tuple(notification_ids)
        ids = ", ".join(str(i) for i in self.notification_ids)
        super().__init__(
            f"{len(self.notification_ids)} outcomes could not be written within shutdown_timeout; the handlers of "
            f"these notifications have run and will run again: {ids}"
        )


# --- errors about tables, columns, indexes and privileges -----------------------------------------


class SchemaError(OutboxError):
    """The tables do not match this version of outboxio."""


class SchemaMissing(SchemaError):
    """Tables, columns or indexes are missing. The message names the first of them, and the command that creates them.

    * ``missing``: descriptions of all missing parts.
    * ``files``: the SQL files that create the missing parts, for tools that run SQL files, as ``outboxio check`` lists
      them.
    * ``by_hand``: statements for parts that existed before and held data, which ``migrate()`` does not recreate.
    * ``instead``: the statements that ``migrate()`` runs for indexes, which it can recreate without loss.
    * ``uses_alembic``: True if the database has Alembic revisions and newer files create the missing parts, so that
      ``outboxio alembic-revision`` applies.
    """

    def __init__(
        self,
        shard: str,
        missing: Sequence[str],
        files: Sequence[str],
        *,
        by_hand: Sequence[str] = (),
        instead: Sequence[str] = (),
        can_migrate: bool = True,
        uses_alembic: bool = False,
    ) -> None:
        self.shard = shard
        self.missing = tuple(missing)
        self.files = tuple(files)
        self.by_hand = tuple(by_hand)
        self.instead = tuple(instead)
        self.can_migrate = can_migrate
        self.uses_alembic = uses_alembic
        more, shown = len(missing) - _MOST_NAMED, instead if len(instead) == 1 else ()
        parts = ", ".join(missing if more <= 1 else [*missing[:_MOST_NAMED], f"and {more} more parts"])
        fixes = [_by_hand(by_hand, files)] * bool(by_hand)
        if can_migrate:
            fixes.append(WITH_ALEMBIC if uses_alembic else "; or run ".join((WITH_MIGRATE, *shown)))
        fix = "; then ".join(fixes) + " (`outboxio check` lists the parts and the SQL files)" * (more > 1)
        super().__init__(f"the database of shard {shard!r} lacks {parts}: {fix}")


_MOST_NAMED = 2  # missing parts in the message
WITH_MIGRATE = "call `await outbox.migrate()`, or run `outboxio migrate`"
WITH_ALEMBIC = "write a revision with `outboxio alembic-revision`, and apply it with `alembic upgrade head`"


class SchemaNewer(SchemaError):
    """The schema was written by a newer version of outboxio."""

    def __init__(self, shard: str, found: int, known: int) -> None:
        self.shard = shard
        self.found = found
        self.known = known
        super().__init__(
            f"the schema of shard {shard!r} is at version {found}, but this outboxio supports versions up to {known}: "
            "upgrade outboxio in this process"
        )


class SchemaOccupied(SchemaError):
    """The database has an incomplete eventlog table that was created by another tool."""

    def __init__(self, shard: str, missing: Sequence[str], statements: Sequence[str] = ()) -> None:
        self.shard = shard
        self.missing = tuple(missing)
        self.statements = tuple(statements)
        super().__init__(
            f"the database of shard {shard!r} has eventlog tables that outboxio did not create and never alters; they "
            f"lack {', '.join(missing)}: add these by hand, as sql/ does ({'; '.join(statements)}), then migrate again"
        )


class SchemaNotAdoptable(SchemaError):
    """The tables of the database are not Ekbatan's, so ``outbox.adopt()`` adopts nothing.

    ``flaws``: descriptions of the differences.
    """

    def __init__(self, shard: str, flaws: Sequence[str]) -> None:
        self.shard = shard
        self.flaws = tuple(flaws)
        super().__init__(
            f"the database of shard {shard!r} cannot be adopted, because {'; '.join(flaws)}; nothing was changed: "
            "change these parts to match Ekbatan's, then adopt again, or call `await outbox.migrate()` in a database "
            "without such tables"
        )


class SchemaInUse(SchemaError):
    """``migrate(contract=True)`` would drop a part that processes of an older version still use.

    ``handlers``: the handlers that these processes announced within the last 2 minutes, each as ``namespace/name``.
    """

    def __init__(self, shard: str, handlers: Sequence[str], files: Sequence[str]) -> None:
        self.shard = shard
        self.handlers = tuple(handlers)
        self.files = tuple(files)
        super().__init__(
            f"shard {shard!r}: a process with an older version of outboxio announced {', '.join(handlers)} within the "
            f"last 2 minutes, and {', '.join(files)} drops a part that it uses; nothing was applied: stop the "
            "processes of the older version, wait for 2 minutes, and migrate with contract again (without contract, "
            "migrate can run beside them)"
        )


class RightsMissing(SchemaError):
    """The database user lacks privileges. ``statements`` are the statements that grant them."""

    def __init__(self, shard: str, who: str, lacking: str, statements: Sequence[str]) -> None:
        self.shard = shard
        self.who = who
        self.statements = tuple(statements)
        super().__init__(
            f"shard {shard!r}: the database user {who} lacks {lacking}: ask the owner of the tables to run "
            f"{'; '.join(statements)}. docs/operate/security.md lists the privileges that each user needs"
        )

    @classmethod
    def from_error(cls, shard: str, error: BaseException) -> RightsMissing:
        """Return the error for a privilege that only the database's message names."""
        grant = "the GRANT for the table or function that the database names"
        return cls(shard, "of this process", f"a privilege ({error})", [grant])


def _by_hand(statements: Sequence[str], files: Sequence[str]) -> str:
    listed = f": {'; '.join(statements)}" if statements else ""
    return (
        "outboxio does not recreate a part that held data, because the loss would go unnoticed. Restore a backup, or "
        f"create the part by hand, as {', '.join(files)} does{listed}"
    )


# --- errors of keyed locks ------------------------------------------------------------------------


class KeyedLockError(OutboxError):
    """A keyed lock was not acquired, or was lost. ``key`` is the key, ``shard`` the shard."""

    def __init__(self, key: str, shard: str, reason: str) -> None:
        self.key = key
        self.shard = shard
        super().__init__(f"lock {key!r} on shard {shard!r} {reason}")


class LockTimeout(KeyedLockError, TimeoutError):
    """A keyed lock was not acquired within ``timeout`` seconds. The block was not entered."""

    def __init__(self, key: str, shard: str, timeout: float, why: str) -> None:
        self.timeout = timeout
        super().__init__(key, shard, f"was not acquired within {timeout:g} s: {why}")


class LockHeld(KeyedLockError):
    """A keyed lock was requested inside its own block, which would deadlock."""

    def __init__(self, key: str, shard: str) -> None:
        super().__init__(
            key, shard, "is held by the enclosing block, so this call would deadlock: pass the lock as an argument, or "
            "start this task outside the block",
        )  # fmt: skip


class LockLost(KeyedLockError):
    """The session of a keyed lock ended before the block did. Another process may have held the lock since."""

    def __init__(self, key: str, shard: str) -> None:
        super().__init__(
            key, shard, "was lost with its session before the block ended, and another process may have held it since: "
            "check the work of the block, or redo it under a new lock",
        )  # fmt: skip
