"""Read the tables, and check that they agree with what the demo did."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from outboxio import Outbox, Settings
from outboxio.testing import emitted

from .domain import TABLES, MoneyDeposited
from .journal import Journal
from .portable import change_schema, sql

OURS = (
    "events", "event_notifications", "subscriptions", "pauses", "schema_versions", "leases", "consumed_events",
    "started_runs", "handler_minutes", "instance_reports", "operations", "jobs", "rates",
)  # fmt: skip


class Check(Struct):
    """A rule, and the figures from the tables that confirm or refute it."""

    rule: str
    holds: bool
    found: str


class Footprint(Struct, frozen=True):
    """The figures that an action could change."""

    events: int
    ledger: int
    balances: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.events + self.ledger


class Auditor:
    """Reads the tables through a separate outbox, which writes no rows itself."""

    def __init__(self, url: str, namespace: str) -> None:
        self._url = url
        self._namespace = namespace
        self._scheme = urlsplit(url).scheme
        self.outbox = Outbox(url, namespace=namespace, settings=Settings(record_empty_actions=False))

    # --- before and after ------------------------------------------------------------------------

    @asynccontextmanager
    async def tables(self) -> AsyncIterator[bool]:
        """Create the service's tables for the block. Yield True if outboxio's tables were created too."""
        applied = await self.outbox.migrate()
        made_them_all = any(file.startswith("0001") for files in applied.values() for file in files)
        try:
            await self._make_own_tables()
            yield made_them_all
        finally:
            await self._clean_up(made_them_all)
            await self.outbox.close()

    async def _make_own_tables(self) -> None:
        await self._drop_own_tables()  # left by a demo that was killed
        await change_schema(self.outbox, *TABLES.values())

    async def _drop_own_tables(self) -> None:
        await change_schema(self.outbox, *(f"DROP TABLE IF EXISTS {name}" for name in TABLES))

    async def _clean_up(self, made_them_all: bool) -> None:
        async with self.outbox.transaction("CleanUp") as tx:
            for name in ("events", "event_notifications", "subscriptions", "started_runs"):
                await tx.execute(sql(tx, f"DELETE FROM {self._named(name)} WHERE namespace = $1"), self._namespace)
            await tx.execute(sql(tx, f"DELETE FROM {self._named('leases')} WHERE name LIKE $1"), f"{self._namespace}/%")
        others = await self.numbers("SELECT (SELECT count(*) FROM {events}) + (SELECT count(*) FROM {subscriptions})")
        if made_them_all and others == (0,):
            await change_schema(self.outbox, *self._unmake())
        await self._drop_own_tables()

    def _unmake(self) -> list[str]:
        if self._scheme == "sqlite":
            return [f"DROP TABLE {self._named(name)}" for name in OURS]
        return ["DROP DATABASE eventlog" if self._scheme in ("mysql", "mariadb") else "DROP SCHEMA eventlog CASCADE"]

    # --- reading ---------------------------------------------------------------------------------

    async def fetch(self, statement: str, *args: Any) -> list[Any]:
        """Fetch all rows. ``{events}`` and similar placeholders stand for the table names in this database."""
        for table in OURS:
            statement = statement.replace(f"{{{table}}}", self._named(table))
        async with self.outbox.transaction("Look") as tx:
            return await tx.fetch(sql(tx, statement), *args)

    async def numbers(self, statement: str, *args: Any) -> tuple[int, ...]:
        """Fetch the first row, as numbers."""
        return tuple(int(value or 0) for value in (await self.fetch(statement, *args))[0])

    async def footprint(self) -> Footprint:
        (events,) = await self.numbers("SELECT count(*) FROM {events} WHERE namespace = $1", self._namespace)
        (ledger,) = await self.numbers("SELECT count(*) FROM outboxio_demo_ledger")
        balances = await self.fetch("SELECT balance FROM outboxio_demo_wallets ORDER BY id")
        return Footprint(events, ledger, tuple(row[0] for row in balances))

    async def committed_by(self, correlation_id: str) -> list[Any]:
        """Fetch the rows that an execution wrote to ``events``, without those that handlers caused."""
        return await self.fetch(
            """SELECT action_name, event_type FROM {events}
            WHERE namespace = $1 AND correlation_id = $2 AND causation_id IS NULL ORDER BY sequence""",
            self._namespace,
            correlation_id,
        )

    async def wallets(self) -> list[Any]:
        return await self.fetch("""
            SELECT w.id, w.balance, count(l.cents) AS entries, coalesce(sum(l.cents), 0) AS booked
            FROM outboxio_demo_wallets w LEFT JOIN outboxio_demo_ledger l ON l.wallet_id = w.id
            GROUP BY w.id, w.balance ORDER BY w.id""")

    async def events(self) -> list[Any]:
        return await self.fetch(
            """SELECT id, action_name, event_type, model_id, causation_id, delivered FROM {events}
            WHERE namespace = $1 ORDER BY sequence""",
            self._namespace,
        )

    # --- checking --------------------------------------------------------------------------------

    async def checks(
        self, refused: Sequence[tuple[Footprint, Footprint]], journal: Journal, forgiven: int
    ) -> list[Check]:
        """Check all rules at the end, against the tables and the journal of runs.

        ``forgiven``: the attempts of dead letters before their retry, which resets the count.
        """
        return [
            await self._money_in_is_money_there(),
            await self._money_out_is_money_in(),
            await self._balances_are_their_ledger(),
            await self._rows_and_events_agree(),
            _refused_left_nothing(refused),
            await self._every_pair_is_handled_once(),
            await self._every_run_is_accounted_for(journal, forgiven),
            await self._causes_are_known(),
        ]

    async def _money_in_is_money_there(self) -> Check:
        deposited = sum(event.cents for event in await emitted(self.outbox, MoneyDeposited))
        balances, wallets = await self.numbers("SELECT sum(balance), count(*) FROM outboxio_demo_wallets")
        return Check(
            "deposits equal balances",
            deposited == balances,
            f"{euros(deposited)} deposited, {euros(balances)} in {wallets} wallets",
        )

    async def _money_out_is_money_in(self) -> Check:
        moves = await self._actions_that_emitted("MoneySent")
        booked = await self.fetch("SELECT action_id, cents FROM outboxio_demo_ledger")
        moved = [row["cents"] for row in booked if row["action_id"] in moves]
        arrived, left = sum(cents for cents in moved if cents > 0), -sum(cents for cents in moved if cents < 0)
        return Check(
            "money sent equals money received",
            arrived == left > 0,
            f"{euros(left)} sent, {euros(arrived)} received",
        )

    async def _balances_are_their_ledger(self) -> Check:
        rows = await self.wallets()
        entries, booked = sum(row["entries"] for row in rows), sum(int(row["booked"]) for row in rows)
        return Check(
            "each balance is the sum of its ledger",
            all(row["balance"] == row["booked"] for row in rows),
            f"{len(rows)} wallets, {entries} entries, {euros(booked)} in total",
        )

    async def _rows_and_events_agree(self) -> Check:
        emitted_by = await self._actions_that_emitted("MoneyDeposited", "MoneySent")
        booked = {row["action_id"] for row in await self.fetch("SELECT action_id FROM outboxio_demo_ledger")}
        return Check(
            "rows and events are committed together",
            set(emitted_by) == booked and len(emitted_by) == len(booked),
            f"{len(booked)} actions in the ledger, {len(emitted_by)} events emitted by them",
        )

    async def _every_pair_is_handled_once(self) -> Check:
        subscriptions = await self.fetch(
            "SELECT handler_name, event_type FROM {subscriptions} WHERE namespace = $1", self._namespace
        )
        notifications = await self.fetch(
            "SELECT event_id, handler_name, state FROM {event_notifications} WHERE namespace = $1", self._namespace
        )
        owed = [
            (str(event["id"]), subscription["handler_name"])
            for event in await self.events()
            for subscription in subscriptions
            if subscription["event_type"] == event["event_type"]
        ]
        there = [(str(row["event_id"]), row["handler_name"]) for row in notifications]
        succeeded = sum(row["state"] == "SUCCEEDED" for row in notifications)
        return Check(
            "every event, every handler, once",
            sorted(owed) == sorted(there) and len(owed) == succeeded > 0,
            f"{len(owed)} owed, {len(there)} notifications, {succeeded} SUCCEEDED",
        )

    async def _every_run_is_accounted_for(self, journal: Journal, forgiven: int) -> Check:
        (attempts,) = await self.numbers(
            "SELECT sum(attempts) FROM {event_notifications} WHERE namespace = $1", self._namespace
        )
        errors = sum(len(record.errors) for record in await self.outbox.admin.list(limit=1000))
        failures = sum(run.error is not None for run in journal.runs)
        return Check(
            "every run is accounted for",
            attempts + forgiven == len(journal.runs) and errors == failures,
            f"{len(journal.runs)} runs, {attempts} + {forgiven} attempts; {errors} errors kept",
        )

    async def _causes_are_known(self) -> Check:
        caused, known = await self.numbers(
            """SELECT count(*), count(cause.id) FROM {events} e
            LEFT JOIN {events} cause ON cause.id = e.causation_id AND cause.correlation_id = e.correlation_id
            WHERE e.namespace = $1 AND e.causation_id IS NOT NULL""",
            self._namespace,
        )
        return Check(
            "events of handlers name their cause",
            caused == known > 0,
            f"events with a cause: {caused}, causes found: {known}",
        )

    async def _actions_that_emitted(self, *event_types: str) -> list[str]:
        """Fetch the ids of the actions that emitted these types, one id per event."""
        rows = await self.fetch("SELECT action_id, event_type FROM {events} WHERE namespace = $1", self._namespace)
        return [str(row["action_id"]) for row in rows if row["event_type"] in event_types]

    def _named(self, table: str) -> str:
        return f"eventlog_{table}" if self._scheme == "sqlite" else f"eventlog.{table}"


def _refused_left_nothing(refused: Sequence[tuple[Footprint, Footprint]]) -> Check:
    before, after = sum(one.rows for one, _ in refused), sum(other.rows for _, other in refused)
    return Check(
        "a refused action writes nothing",
        bool(refused) and all(one == other for one, other in refused),
        f"{len(refused)} refused; {before} rows before, {after} rows after",
    )


def euros(cents: int) -> str:
    return f"{cents / 100:,.2f}"
