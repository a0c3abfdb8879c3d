"""The error for an operation for which the user of the database lacks a right."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from outboxio.errors import RightsMissing
from outboxio.storage.protocols import Database


@asynccontextmanager
async def naming_rights(database: Database, kind: str) -> AsyncGenerator[None]:
    """Raise :class:`RightsMissing` where the body fails because the user may not carry out an operation.

    ``kind``: of the operation. An operation is not checked beforehand, because the check takes further queries.
    """
    try:
        yield
    except Exception as error:
        if not database.lacks_rights(error):
            raise
        lacking = await database.schema.rights_lacking()
        raise lacking.get(kind) or RightsMissing.told_by(database.name, error) from error
