"""The protocols of operators, maintenance and start-up: correctness matters more than speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol
from uuid import UUID

from outboxio.errors import RightsMissing
from outboxio.model.lock_name import Slot
from outboxio.model.notification import NotificationRecord
from outboxio.storage.schema import Rights


class OperatorStore(Protocol):
    """The ``event_notifications`` table for operators, retention and drains."""

    async def any_due(self, namespace: str, now: datetime, slots: Sequence[Slot]) -> bool: ...

    async def count_states(self, namespace: str) -> dict[str, int]: ...

    async def unfinished_names(self, namespace: str) -> list[str]:
        """The handler names with unfinished rows, BLOCKED rows included. The rows themselves are not read."""
        ...

    async def count_unfinished(self, namespace: str, names: Sequence[str]) -> int: ...

    async def oldest_unfinished(self, namespace: str, name: str) -> datetime | None:
        """The creation date of the unfinished row that is due first; ``None`` if all unfinished rows are BLOCKED."""
        ...

    async def expire(self, namespace: str, names: Sequence[str], before: datetime, now: datetime, limit: int) -> int:
        """End up to ``limit`` unfinished rows whose retention started before ``before``; the number of rows.

        BLOCKED rows expire as well, DYING rows never.
        """
        ...

    async def select(
        self, namespace: str, state: str | None, handler_name: str | None, event_type: str | None, limit: int
    ) -> list[NotificationRecord]: ...

    async def select_by_id(self, namespace: str, ids: Sequence[UUID]) -> list[NotificationRecord]:
        """The notifications with these ids, and the notifications of the events with these ids."""
        ...

    async def retry(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        """Make rows due, BLOCKED and finished rows in the partition that the row belongs to now; the number of rows.

        A row in PENDING, FAILED or DYING keeps its partition: the process that owns the partition may run the row.
        """
        ...

    async def skip(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int: ...

    async def resume(self, namespace: str, names: Sequence[str], ordering_key: str, now: datetime) -> int:
        """Skip the DEAD and EXPIRED rows that park an ordering key; the number of rows."""
        ...

    async def replay(
        self,
        namespace: str,
        names: Sequence[str],
        since: datetime,
        until: datetime,
        types: Sequence[str],
        states: Sequence[str],
        now: datetime,
    ) -> int:
        """Make finished rows of these names due again, as :meth:`retry` does, if ``since <= event_date < until``.

        ``types``: only these event types; empty for all types. The rows change in pieces, each in a separate
        transaction. Returns the number of rows.
        """
        ...


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
