"""The base of all queries and operations of :class:`~outboxio.operations.admin.Admin`."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from outboxio.errors import RightsMissing, SchemaError
from outboxio.handlers.handler import HandlerRegistry
from outboxio.health.overview import OverviewReader
from outboxio.model.event import EventTypes
from outboxio.model.redaction import Redact
from outboxio.operations.arguments import KnownNames
from outboxio.operations.recorder import AdminShard, AdminShards, BulkCutoffs, By, Recorder
from outboxio.settings import Settings
from outboxio.support.ids import ProcessName


class AdminSetup(Struct, frozen=True, kw_only=True):
    """The parts of an outbox that ``Admin`` needs."""

    namespace: str
    shards: Mapping[str, AdminShard]
    settings: Settings
    handlers: HandlerRegistry
    types: EventTypes
    redact: Redact
    owner: object
    """The outbox, whose transactions would block an operation on a database with a single writer."""
    process: ProcessName
    """The name of this process in ``leases`` and ``operations``."""
    cutoffs: BulkCutoffs
    """The upper bounds of bulk operations."""
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
        self._known = KnownNames(setup.namespace, setup.handlers, setup.types)
        self._recorder = Recorder(
            setup.namespace, self._shards, setup.process, by, setup.redact, setup.overviews.operation_ended
        )

    async def explained(self, error: Exception) -> Exception:
        """Return the error to show: :class:`RightsMissing` or :class:`SchemaMissing` if that is the cause of ``error``.

        Otherwise returns ``error`` itself.
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
                return RightsMissing.from_error(database.name, error)
        return error
