"""``outbox.admin``: queries and operations for operators."""

from __future__ import annotations

from outboxio.operations.arguments import name_argument
from outboxio.operations.cancelling import CancelOperations
from outboxio.operations.handlers import HandlerOperations
from outboxio.operations.jobs import JobOperations
from outboxio.operations.notifications import NotificationOperations
from outboxio.operations.partitions.operations import PartitionOperations
from outboxio.operations.queries.actions import ActionQueries, OperationQueries
from outboxio.operations.queries.events import EventQueries
from outboxio.operations.queries.history import HistoryQueries
from outboxio.operations.queries.notifications import NotificationQueries
from outboxio.operations.queries.overview import OverviewQueries
from outboxio.operations.recorder import By


class Admin(
    OverviewQueries,
    NotificationQueries,
    EventQueries,
    ActionQueries,
    HistoryQueries,
    OperationQueries,
    NotificationOperations,
    CancelOperations,
    HandlerOperations,
    PartitionOperations,
    JobOperations,
):
    """Queries and operations on the notifications of a namespace, on all shards unless ``shard`` names one.

    - Inspect: ``overview``, ``count``, ``list``, ``groups``, ``inspect``, ``export``, ``events``, ``event``,
      ``documents``, ``emitters``, ``states``, ``tree``, ``actions``, ``handlers``, ``history``, ``keys``,
      ``stranded``, ``counts``, ``waiting``.
    - Fix: ``retry``, ``skip``, ``cancel``, ``resume``, ``replay``, ``backfill``, ``pause``, ``unpause``.
    - Maintain: ``partitions``, ``instances``, ``locks``, ``purge``, ``unsubscribe``.
    - Jobs: ``jobs``, ``job``, ``pause_job``, ``unpause_job``, ``run_job_now``, ``remove_job``.
    - Past and running operations: ``operations``, ``operation``, ``stop``.

    The name of a handler includes its aliases. A handler name that is neither registered here nor known to the
    namespace (by a subscription, a pause, or a notification) raises :class:`UnknownHandler` with the closest known
    name. An invalid value raises :class:`ConfigurationError`. In both cases no row changes.

    Each operation is recorded as an :class:`Operation`, with the arguments ``actor`` and ``reason`` of the call.

    Example::

        async def retry_failures(admin: Admin) -> None:
            for group in await admin.groups():
                await admin.retry(group.filter, actor="ada", reason="the PDF service is back")
    """

    def by(self, actor: str, *, origin: str = "code") -> Admin:
        """Return an ``Admin`` that records its operations with this actor and origin.

        ``origin``: where the operations come from, such as ``cli`` or ``dashboard``; at most 24 characters.

        Example::

            admin = outbox.admin.by("ada@example.org", origin="dashboard")
            await admin.pause("invoice-pdf", reason="the PDF service moves")
        """
        return Admin(self._setup, By(name_argument(actor, "actor"), name_argument(origin, "origin")[:24]))
