"""The parts that all questions and orders of :class:`~outboxio.operations.admin.Admin` share."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from outboxio.errors import RightsMissing, SchemaError
from outboxio.handlers.handler import HandlerRegistry
from outboxio.health.overview import OverviewReader
from outboxio.model.event import EventTypes
from outboxio.model.redaction import Redact
from outboxio.operations.arguments import Known
from outboxio.operations.recorder import AdminShard, AdminShards, By, Ends, Recorder
from outboxio.settings import Settings
from outboxio.support.ids import ProcessName


class AdminSetup(Struct, frozen=True, kw_only=True):
    """The parts of an outbox that operators reach."""

    namespace: str
    shards: Mapping[str, AdminShard]
    settings: Settings
    handlers: HandlerRegistry
    types: EventTypes
    redact: Redact
    owner: object
    """The outbox, whose transactions would block an order on a database with a single writer."""
    process: ProcessName
    """The name of this process in ``leases`` and ``operations``."""
    ends: Ends
    """Of bulk orders."""
    overviews: OverviewReader
    """Shared with ``outbox.health()``."""


class AdminBase:
    """The base class of all parts of ``Admin``."""

    def __init__(self, setup: AdminSetup, by: By) -> None:
        self._setup = setup
        self._namespace = setup.namespace
        self._settings = setup.settings
        self._handlers = setup.handlers
        self._types = setup.types
        self._redact = setup.redact
        self._shards = AdminShards(setup.shards, setup.owner)
        self._known = Known(setup.namespace, setup.handlers, setup.types)
        self._recorder = Recorder(
            setup.namespace, self._shards, setup.process, by, setup.redact, setup.overviews.operation_ended
        )

    async def explained(self, error: Exception) -> Exception:
        """The error to show: :class:`RightsMissing` if a database has refused to read a table, or else ``error``.

        :class:`SchemaMissing` if a database lacks a table.
        """
        for database in self._shards.databases(None):
            if database.lacks_schema(error):
                try:
                    await database.schema.check()
                except SchemaError as missing:
                    return missing
            if database.lacks_rights(error):
                try:
                    await database.schema.check()
                except RightsMissing as missing:
                    return missing
                return RightsMissing.told_by(database.name, error)
        return error
