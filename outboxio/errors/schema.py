"""Errors about tables, columns, indexes and rights."""

from __future__ import annotations

from collections.abc import Sequence

from outboxio.errors.root import OutboxError


class SchemaError(OutboxError):
    """The tables do not fit this version of outboxio."""


class SchemaMissing(SchemaError):
    """Tables, columns or indexes are missing.

    * ``files``: the SQL files that make the missing parts.
    * ``by_hand``: statements for parts that existed before and held data, which ``migrate()`` does not make again.
    * ``instead``: the statements that ``migrate()`` runs for indexes, which hold only copies of data.
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
    ) -> None:
        self.shard = shard
        self.missing = tuple(missing)
        self.files = tuple(files)
        self.by_hand = tuple(by_hand)
        self.instead = tuple(instead)
        self.can_migrate = can_migrate
        remedies = [_by_hand(by_hand, files)] * bool(by_hand)
        if can_migrate:
            other = f"run {'; '.join(instead)}" if instead else f"apply {', '.join(files)}"
            remedies.append(f"call `await outbox.migrate()`, run `outboxio migrate`, or {other}")
        super().__init__(f"the database of shard {shard!r} lacks {', '.join(missing)}: {'; then '.join(remedies)}")


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
