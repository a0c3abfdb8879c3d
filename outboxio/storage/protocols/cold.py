"""The protocol of migration, and of the checks at start-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from outboxio.errors import RightsMissing
from outboxio.storage.schema import Rights


class Schema(Protocol):
    """The tables: migration, and the check that all tables are complete."""

    async def migrate(self, *, contract: bool = False) -> list[str]:
        """Apply the files that are not applied yet; their names.

        A file that drops a part for which an older version has a use (a contract file) waits for ``contract``. Raises
        :class:`SchemaInUse` if an older version has announced handlers within 2 minutes, in any namespace.
        """
        ...

    async def adopt(self, *, dry_run: bool = False) -> list[str]:
        """Take over the tables of Ekbatan, and apply the later files; the statements that were run for the tables.

        With ``dry_run`` nothing changes. Raises :class:`SchemaNotAdoptable` for tables that are not Ekbatan's.
        """
        ...

    async def pending(self) -> list[str]:
        """The contract files that are not applied yet; their names."""
        ...

    async def orders_refused(self) -> str | None:
        """Why this user cannot change notifications here: a standby, or a missing right; ``None`` if orders work."""
        ...

    async def rights_lacking(self) -> Mapping[str, RightsMissing]:
        """The kinds of operations for which this user lacks a right, each with the error that names the right."""
        ...

    async def check(self, needed: Rights | None = None) -> None:
        """Raise :class:`SchemaMissing` or :class:`SchemaNewer` unless the tables are complete.

        ``needed``: the rights that the process needs on each table. Raises :class:`RightsMissing` without these rights,
        or without the right to read the tables that exist.
        """
        ...
