"""The demo: actions, handlers, a retry and a dead letter, each with code and outcome; then a check of the tables."""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from msgspec import Struct
from rich.console import Console
from rich.text import Text

from outboxio import Action, Admin, ConfigurationError, Filter, Operation, Outbox

from . import show
from .audit import Auditor, Footprint
from .domain import DepositMoney, OpenWallet, Overdraft, SendMoney
from .handlers import Bank, Mailbox, NotifyBank, World, register, send_receipt
from .journal import Journal, WatchedOutbox

LONGEST_WAIT = 15.0  # seconds; the retries need less than 1


class Request(Struct):
    """A request to the service."""

    says: str
    action: Action


REQUESTS = (
    Request("Ada opens a wallet", OpenWallet("ada")),
    Request("Bob opens a wallet", OpenWallet("bob")),
    Request("Eve opens a wallet", OpenWallet("eve")),
    Request("Ada deposits 120.00", DepositMoney("ada", 120_00)),
    Request("Ada sends Bob 30.00", SendMoney("ada", "bob", 30_00)),
    Request("Bob sends Eve 500.00", SendMoney("bob", "eve", 500_00)),
    Request("Ada sends Eve 5.00", SendMoney("ada", "eve", 5_00)),
)
DEAD = Filter(states=("DEAD",))


async def retry_dead(admin: Admin) -> Operation:
    return await admin.retry(DEAD, reason="reopened")


async def run(database: str | None, console: Console) -> bool:
    """Run the demo on a database (``None``: a temporary SQLite file). Return True if all checks pass."""
    with _somewhere(database) as url, _quiet_log():
        return await Demo(url, console).run()


class Demo:
    """One run of the demo."""

    def __init__(self, url: str, console: Console) -> None:
        self._url = url
        self._console = console
        self._namespace = f"outboxio-demo-{secrets.token_hex(3)}"
        self._auditor = Auditor(url, self._namespace)
        self._journal = Journal()
        self._executed = self._forgiven = 0
        self._refused: list[tuple[Footprint, Footprint]] = []
        self._world = World(Mailbox(), Bank(outages=2, closed={"eve"}), [])

    async def run(self) -> bool:
        show.title(self._console, _shown(self._url), self._namespace)
        async with self._auditor.tables() as made_eventlog:
            async with WatchedOutbox(
                self._url, namespace=self._namespace, resources=self._world, journal=self._journal
            ) as outbox:
                register(outbox, self._world)
                await self._commits(outbox)
                async with outbox.running():
                    await _until_settled(outbox)
                    self._handles()
                    await self._retries_a_dead_letter(outbox)
            adds_up = await self._verify()
        show.farewell(self._console, adds_up, _leaves_behind(made_eventlog))
        return adds_up

    # --- steps -----------------------------------------------------------------------------------

    async def _commits(self, outbox: Outbox) -> None:
        show.step(self._console, 1, "An action commits its rows and its events together, or neither")
        committed = [await self._execute(outbox, request) for request in REQUESTS]
        show.beside(self._console, SendMoney, committed)

    def _handles(self) -> None:
        show.step(self._console, 2, "Each handler runs independently, after the commit")
        runs = [run for run in self._journal.page if run.handler != NotifyBank.name]
        show.beside(self._console, send_receipt, show.ran(runs))
        show.step(self._console, 3, "A failed handler is retried, and no other handler waits")
        show.beside(self._console, NotifyBank, show.attempted(run for run in self._journal.page if run not in runs))

    async def _retries_a_dead_letter(self, outbox: Outbox) -> None:
        show.step(self._console, 4, "An event that failed permanently is a dead letter: find it, fix it, retry it")
        self._world.bank.closed.clear()
        self._journal.turn_page()
        found = [show.group(group) for group in await outbox.admin.groups(DEAD)]
        self._forgiven = sum(letter.attempts for letter in await outbox.admin.list(DEAD))
        done = await retry_dead(outbox.admin)
        await _until_settled(outbox)
        show.beside(self._console, retry_dead, [*found, show.operation(done), *show.attempted(self._journal.page)])

    async def _verify(self) -> bool:
        show.step(self._console, 5, "Does it add up? The tables compared with the observed runs")
        checks = await self._auditor.checks(self._refused, self._journal, self._forgiven)
        show.checks(self._console, checks)
        return all(check.holds for check in checks)

    async def _execute(self, outbox: Outbox, request: Request) -> Text:
        """Execute a request. Return a line with the rows that it wrote to ``events``."""
        correlation_id = f"request-{self._executed + len(self._refused)}"
        before = await self._auditor.footprint()
        try:
            await outbox.execute(request.action, correlation_id=correlation_id)
        except Overdraft as error:
            after = await self._auditor.footprint()
            self._refused.append((before, after))
            return show.refused(request.says, error, after.rows - before.rows)
        self._executed += 1
        return show.committed(request.says, await self._auditor.committed_by(correlation_id))


# --- waiting: for a limited time; the checks report unfinished work -----------------------------------


async def _until_settled(outbox: Outbox) -> None:
    """Wait until no row is due or waits for a retry."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_WAIT):
            while True:
                drained = await outbox.drain()
                counts = await outbox.admin.counts()
                if not (counts["PENDING"] or counts["FAILED"] or drained.fanned_out or drained.succeeded):
                    return
                await asyncio.sleep(0.01)


# --- texts ---------------------------------------------------------------------------------------


def _leaves_behind(made_eventlog: bool) -> str:
    if made_eventlog:
        return "All tables that the demo created have been removed."
    return "The demo's tables and rows have been removed; the eventlog existed before and stays."


# --- the database --------------------------------------------------------------------------------


@contextmanager
def _somewhere(database: str | None) -> Iterator[str]:
    """Yield the URL of the database. A file replaces an in-memory SQLite, which each connection would have anew."""
    if database and not database.rstrip("/").endswith((":", ":memory:")):
        _refuse_no_database(database)
        yield database
        return
    with tempfile.TemporaryDirectory(prefix="outboxio-demo-") as directory:
        yield f"sqlite:///{Path(directory) / 'wallets.db'}"


def _refuse_no_database(url: str) -> None:
    """Raise if the URL of a MySQL or MariaDB server names no database, because the demo's tables need one."""
    parts = urlsplit(url)
    if parts.scheme in _SERVERS and not parts.path.strip("/"):
        raise ConfigurationError(
            f"{_shown(url)} names no database for the demo's tables; create one and pass "
            f"{parts.scheme}://user:password@host/database"
        )


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Silence the log, which Python would print without a log handler: the demo shows the failures itself."""
    logger, handler = logging.getLogger("outboxio"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


_SERVERS = {"mysql": "MySQL", "mariadb": "MariaDB"}


def _shown(url: str) -> str:
    """Return the address without user and password."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return f"SQLite, {url.removeprefix('sqlite:///')}"
    [socket] = parse_qs(parts.query).get("unix_socket", [""])
    address = socket or parts.netloc.rpartition("@")[2] or "localhost"
    return f"{_SERVERS.get(parts.scheme, 'PostgreSQL')} at {address}{parts.path}"
