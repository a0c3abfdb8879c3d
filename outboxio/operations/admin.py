"""``outbox.admin``: the questions and orders of an operator."""

from __future__ import annotations

from outboxio.operations.arguments import given_name
from outboxio.operations.cancelling import CancelOperations
from outboxio.operations.handlers import HandlerOrders
from outboxio.operations.jobs import JobOrders
from outboxio.operations.notifications import NotificationOrders
from outboxio.operations.partitions.orders import PartitionOrders
from outboxio.operations.queries.actions import ActionQuestions, OperationQuestions
from outboxio.operations.queries.events import EventQuestions
from outboxio.operations.queries.history import HistoryQuestions
from outboxio.operations.queries.notifications import Questions
from outboxio.operations.queries.overview import OverviewQuestions
from outboxio.operations.recorder import By


class Admin(
    OverviewQuestions,
    Questions,
    EventQuestions,
    ActionQuestions,
    HistoryQuestions,
    OperationQuestions,
    NotificationOrders,
    CancelOperations,
    HandlerOrders,
    PartitionOrders,
    JobOrders,
):
    """Questions and orders about all notifications of a namespace, on all shards unless ``shard`` names a shard.

    - Look: ``overview``, ``count``, ``list``, ``groups``, ``inspect``, ``export``, ``events``, ``event``,
      ``documents``, ``emitters``, ``states``, ``tree``, ``actions``, ``handlers``, ``history``, ``keys``,
      ``stranded``, ``counts``, ``waiting``.
    - Mend: ``retry``, ``skip``, ``cancel``, ``resume``, ``replay``, ``backfill``, ``pause``, ``unpause``.
    - Keep house: ``partitions``, ``instances``, ``locks``, ``purge``, ``unsubscribe``.
    - Jobs: ``jobs``, ``job``, ``pause_job``, ``unpause_job``, ``run_job_now``, ``remove_job``.
    - Look at orders: ``operations``, ``operation``, ``stop``.

    The name of a handler stands for its aliases as well. A handler name that is neither registered here nor known to
    the namespace (by a subscription, a pause, or a notification) raises :class:`UnknownHandler` with the name that was
    probably meant. A value without a meaning raises :class:`ConfigurationError`. In both cases no row changes.

    Each order is recorded as an :class:`Operation`, with the arguments ``actor`` and ``reason`` of the call.

    Example::

        async def mend(admin: Admin) -> None:
            for group in await admin.groups():
                await admin.retry(group.filter, actor="ada", reason="the PDF service is back")
    """

    def by(self, actor: str, *, origin: str = "code") -> Admin:
        """The same questions and orders, with orders of this actor and from this origin.

        ``origin``: the place of the orders in their records, of at most 24 characters: ``cli``, ``dashboard``.

        Example::

            admin = outbox.admin.by("ada@example.org", origin="dashboard")
            await admin.pause("invoice-pdf", reason="the PDF service moves")
        """
        return Admin(self._setup, By(given_name(actor, "actor"), given_name(origin, "origin")[:24]))
