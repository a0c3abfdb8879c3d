"""Errors of databases, and of work that did not end in time."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outboxio.errors.configuration import OutboxError


class DatabaseError(OutboxError):
    """The database or the network failed. ``__cause__`` is the exception of the driver."""


class DatabaseUnavailable(DatabaseError):
    """A database cannot be reached, does not answer any more, or is read-only at present."""

    _failed = "cannot be reached"

    def __init__(self, shard: str, where: str, reason: str) -> None:
        self.shard = shard
        self.where = where
        self.reason = reason
        super().__init__(f"shard {shard!r} at {where} {self._failed}: {reason}")


class PoolExhausted(DatabaseUnavailable):
    """All connections of a pool were in use for the setting ``pool_timeout``. The action was not begun.

    On SQLite the writing connection is a pool of size 1. ``held``: the seconds since the longest-used connection was
    taken; ``None`` if the pool is the application's.
    """

    _failed = "has no connection left"

    def __init__(self, shard: str, where: str, *, size: int, in_use: int, held: float | None, timeout: float) -> None:
        self.size = size
        self.in_use = in_use
        self.held = held
        self.timeout = timeout
        longest = "" if held is None else f", one of them for {held:.1f} s"
        super().__init__(
            shard,
            where,
            f"{in_use} of at most {size} connections for actions are in use{longest}, and none came back within "
            f"pool_timeout, {timeout:g} s. An action that waits for another service or for a lock keeps its "
            "connection: shorten such actions, run fewer at once, or raise pool_timeout",
        )


class DrainTimeout(OutboxError, TimeoutError):
    """``drain`` still found due work at the timeout."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        super().__init__(
            f"shard {shard!r} still has due work after the timeout of drain(): handlers take longer, or another "
            "process holds the locks and is not through yet"
        )


class ShutdownError(OutboxError):
    """Outcomes could not be written within the setting ``shutdown_timeout``. The handlers will run again."""

    def __init__(self, notification_ids: Sequence[UUID]) -> None:
        self.notification_ids = tuple(notification_ids)
        ids = ", ".join(str(i) for i in self.notification_ids)
        super().__init__(
            f"{len(self.notification_ids)} outcomes could not be written before shutdown_timeout; these handlers have "
            f"run and will run again: {ids}"
        )


# --- errors about tables, columns, indexes and rights ---------------------------------------------


class SchemaError(OutboxError):
    """The tables do not fit this version of outboxio."""


class SchemaMissing(SchemaError):
    """Tables, columns or indexes are missing. The message names the first of them, and the command that makes them.

    * ``missing``: all missing parts, in words.
    * ``files``: the SQL files that make the missing parts, for a tool that runs SQL files, as ``outboxio check`` lists.
    * ``by_hand``: statements for parts that existed before and held data, which ``migrate()`` does not make again.
    * ``instead``: the statements that ``migrate()`` runs for indexes, which hold only copies of data.
    * ``uses_alembic``: the database has revisions of Alembic, and the missing parts are of newer files, so that
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
            f"the schema of shard {shard!r} is at version {found}, this outboxio knows versions up to {known}: "
            "upgrade outboxio in this process"
        )


class SchemaOccupied(SchemaError):
    """The database has an incomplete eventlog table of a foreign tool."""

    def __init__(self, shard: str, missing: Sequence[str], statements: Sequence[str] = ()) -> None:
        self.shard = shard
        self.missing = tuple(missing)
        self.statements = tuple(statements)
        super().__init__(
            f"the database of shard {shard!r} has eventlog tables that outboxio did not make and never edits; they "
            f"lack {', '.join(missing)}: add these by hand, as sql/ does ({'; '.join(statements)}), then migrate again"
        )


class SchemaNotAdoptable(SchemaError):
    """The tables of the database are not those of Ekbatan, so ``outbox.adopt()`` takes nothing over.

    ``flaws``: the differences, each in words.
    """

    def __init__(self, shard: str, flaws: Sequence[str]) -> None:
        self.shard = shard
        self.flaws = tuple(flaws)
        super().__init__(
            f"the database of shard {shard!r} cannot be taken over, because {'; '.join(flaws)}; nothing was changed: "
            "make these parts as Ekbatan has them, then adopt again, or call `await outbox.migrate()` in a database "
            "without such tables"
        )


class SchemaInUse(SchemaError):
    """``migrate(contract=True)`` would drop a part that processes of an older version still use.

    ``handlers``: the handlers that these processes have announced within 2 minutes, each as ``namespace/name``.
    """

    def __init__(self, shard: str, handlers: Sequence[str], files: Sequence[str]) -> None:
        self.shard = shard
        self.handlers = tuple(handlers)
        self.files = tuple(files)
        super().__init__(
            f"shard {shard!r}: a process of an older version of outboxio has announced {', '.join(handlers)} within 2 "
            f"minutes, and {', '.join(files)} drops a part that this process uses; nothing was applied: stop the "
            "processes of the older version, wait for 2 minutes, and migrate with contract again (without contract, "
            "migrate works beside them)"
        )


class RightsMissing(SchemaError):
    """The user of the database lacks rights. ``statements`` grant them to the user."""

    def __init__(self, shard: str, who: str, lacking: str, statements: Sequence[str]) -> None:
        self.shard = shard
        self.who = who
        self.statements = tuple(statements)
        super().__init__(
            f"shard {shard!r}: the database's user {who} lacks {lacking}: ask the owner of the tables to run "
            f"{'; '.join(statements)}. docs/operate/security.md says which rights each user needs"
        )

    @classmethod
    def told_by(cls, shard: str, error: BaseException) -> RightsMissing:
        """The error for a right that the database alone can name."""
        grant = "the GRANT for the table or function that the database names"
        return cls(shard, "of this process", f"a right ({error})", [grant])


def _by_hand(statements: Sequence[str], files: Sequence[str]) -> str:
    told = f": {'; '.join(statements)}" if statements else ""
    return (
        "outboxio does not make a part again that held data, because the loss would go unnoticed. Restore a backup, or "
        f"make the part by hand, as {', '.join(files)} does{told}"
    )


# --- errors of keyed locks ------------------------------------------------------------------------


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
