"""The tables that operators use, each written once for all dialects (see ``storage/statement.py``)."""

from __future__ import annotations

from outboxio.storage.statement import Port
from outboxio.storage.tables.bootstraps import Bootstraps
from outboxio.storage.tables.deferred import Deferred
from outboxio.storage.tables.event_search import EventSearch
from outboxio.storage.tables.events import StoredEvents
from outboxio.storage.tables.jobs import Jobs
from outboxio.storage.tables.notifications import StoredNotifications
from outboxio.storage.tables.operations import Operations
from outboxio.storage.tables.partitions import PartitionTables
from outboxio.storage.tables.probes import Probes
from outboxio.storage.tables.rates import Rates
from outboxio.storage.tables.reports import Reports
from outboxio.storage.tables.retention import Retention
from outboxio.storage.tables.scans import Bounds
from outboxio.storage.tables.search import NotificationSearch
from outboxio.storage.tables.starts import Starts
from outboxio.storage.tables.subscriptions import Subscriptions


class Tables:
    """The tables of a shard, mixed into the database class of each dialect."""

    def __init__(
        self, shard: str, bounds: Bounds, admin: Port, find: Port, settle: Port, jobs: Port, *, partitions: bool = True
    ) -> None:
        self.bootstraps = Bootstraps(admin)
        self.deferred = Deferred(admin)
        self.jobs = Jobs(admin, jobs)
        self.operations = Operations(admin, shard)
        self.partitions = PartitionTables(admin) if partitions else None
        self.probes = Probes(admin)
        self.rates = Rates(find, returns=partitions)
        self.reports = Reports(admin)
        self.retention = Retention(admin)
        self.starts = Starts(find, settle, admin)
        self.subscriptions = Subscriptions(admin)
        self.stored_notifications = StoredNotifications(admin, shard)
        self.search = NotificationSearch(admin, bounds, self.probes, self.stored_notifications)
        self.event_search = EventSearch(admin, self.search, self.stored_notifications)
        self.stored_events = StoredEvents(admin, self.subscriptions)
