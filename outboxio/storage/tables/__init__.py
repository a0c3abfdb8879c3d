"""The tables that operators use, each written once for all dialects (see ``storage/statement.py``)."""

from __future__ import annotations

from outboxio.storage.statement import Port
from outboxio.storage.tables.operations import Operations
from outboxio.storage.tables.subscriptions import Subscriptions


class Tables:
    """The tables of a shard, for the class of each database."""

    def __init__(self, port: Port, shard: str) -> None:
        self.operations = Operations(port, shard)
        self.subscriptions = Subscriptions(port)
