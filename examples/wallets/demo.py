"""The story: two versions of the wallet service in turn on a single database, and the proof at the end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from msgspec import Struct
from rich.console import Console

from outboxio import Action, ConfigurationError, Outbox

from . import show
from .audit import Auditor, Footprint
from .domain import DepositMoney, OpenWallet, Overdraft, RenameWallet, TransferMoney
from .handlers import HOUSE, Bank, Mailbox, World, version_1, version_2
from .journal import Journal, WatchedOutbox

LONGEST_WAIT = 15.0  # seconds; the retries need less than 1


class Request(Struct):
    """A request to the service."""

    says: str
    action: Action


REQUESTS_TO_VERSION_1 = (
    Request("Ada opens a wallet", OpenWallet("ada", "Ada")),
    Request("Bob opens a wallet", OpenWallet("bob", "Bob")),
    Request("the house opens one too", OpenWallet(HOUSE, "The House")),
    Request("the house deposits 50.00", DepositMoney(HOUSE, 50_00)),
    Request("Ada deposits 120.00", DepositMoney("ada", 120_00)),
)
REQUESTS_TO_VERSION_2 = (
    Request("Bob sends Ada 500.00", TransferMoney("bob", "ada", 500_00)),
    Request("Bob deposits 40.00", DepositMoney("bob", 40_00)),
    Request("Ada sends Bob 30.00", TransferMoney("ada", "bob", 30_00)),
    Request("Ada takes her full name", RenameWallet("ada", "Ada Lovelace")),
)


async def run(database: str | None, console: Console) -> bool:
    """Tell the story on a database (``None``: a temporary SQLite file); True if all sums agree."""
    with _somewhere(database) as url, _quiet_log():
        return await Story(url, console).tell()


class Story:
    """A single telling of the story."""

    def __init__(self, url: str, console: Console) -> None:
        self._url = url
        self._console = console
        self._namespace = f"outboxio-demo-{secrets.token_hex(3)}"
        self._auditor = Auditor(url, self._namespace)
        self._journal = Journal()
        self._executed = 0
        self._refused: list[tuple[Footprint, Footprint]] = []

    async def tell(self) -> bool:
        show.title(self._console, _shown(self._url), self._namespace)
        async with self._auditor.tables() as made_eventlog:
            await self._version_1()
            await self._version_2()
            await self._end_state()
            adds_up = await self._proof()
        show.farewell(self._console, adds_up, _leaves_behind(made_eventlog))
        return adds_up

    # --- chapters --------------------------------------------------------------------------------

    async def _version_1(self) -> None:
        show.step(
            self._console,
            1,
            "Version 1 of the service commits, fans out, and is stopped",
            "Each action commits its own rows and its events in one transaction. Fan-out then makes one notification "
            "for each event and handler. Before any handler runs, the next version is deployed.",
        )
        async with Outbox(self._url, namespace=self._namespace) as outbox:
            version_1(outbox)
            async with outbox.running(handling=False):
                await self._serve(outbox, REQUESTS_TO_VERSION_1)
                await _until_fanned_out(outbox)
            show.fanned_out(self._console, await outbox.admin.list())

    async def _version_2(self) -> None:
        world = World(Mailbox(), Bank(outages=2), [])
        async with WatchedOutbox(
            self._url, namespace=self._namespace, resources=world, journal=self._journal
        ) as outbox:
            version_2(outbox, world)
            show.step(
                self._console,
                2,
                "Version 2 handles the events of version 1",
                "The handler deposit-receipt had the name receipt before, and has the old name as an alias. The bonus "
                "handler executes a second action, and the event of that action is handled in turn.",
            )
            self._journal.turn_page()
            async with outbox.running():
                await _until_settled(outbox)
                show.ran(self._console, self._journal.page)
                await self._more_requests(outbox)

    async def _more_requests(self, outbox: Outbox) -> None:
        show.step(
            self._console,
            3,
            "Version 2 serves requests",
            "A refused transfer leaves no row behind. A rename emits no event. The bank does not answer twice, so the "
            "handler runs again after about 200 ms, and about 400 ms later. No other handler waits.",
        )
        self._journal.turn_page()
        await self._serve(outbox, REQUESTS_TO_VERSION_2)
        await _until_settled(outbox)
        show.ran(self._console, self._journal.page)

    async def _end_state(self) -> None:
        show.step(self._console, 4, "The wallets at the end", "The service's own tables.")
        show.wallets(self._console, await self._auditor.wallets())
        events = await self._auditor.events()
        show.step(
            self._console,
            5,
            "The events at the end",
            "Every row of events: the facts that the actions recorded, in the order of the commits.",
        )
        show.events(self._console, events)
        notifications = await self._auditor.outbox.admin.list(limit=1000)
        show.step(
            self._console,
            6,
            "The notifications at the end",
            "Every row of event_notifications: event, handler, state, and the number of attempts.",
        )
        show.notifications(self._console, notifications, events)

    async def _proof(self) -> bool:
        show.step(
            self._console,
            7,
            "Does it add up?",
            "Counts in the tables, compared with the observed runs.",
        )
        checks = await self._auditor.checks(self._executed, self._refused, self._journal)
        show.proof(self._console, checks)
        return all(check.holds for check in checks)

    # --- one request -----------------------------------------------------------------------------

    async def _serve(self, outbox: Outbox, requests: Sequence[Request]) -> None:
        committed = show.Committed()
        for number, request in enumerate(requests, self._executed + len(self._refused)):
            await self._execute(outbox, request, f"request-{number}", committed)
        committed.show(self._console)

    async def _execute(self, outbox: Outbox, request: Request, correlation_id: str, committed: show.Committed) -> None:
        action, name = request.action, type(request.action).__name__
        before = await self._auditor.footprint()
        try:
            await outbox.executor.execute(action, correlation_id=correlation_id)
        except Overdraft as error:
            after = await self._auditor.footprint()
            self._refused.append((before, after))
            committed.refused(request.says, name, error, before.rows, after.rows)
        else:
            self._executed += 1
            committed.done(request.says, name, await self._auditor.committed_by(correlation_id))


# --- waiting: for a limited time; unfinished work shows in the proof --------------------------------


async def _until_fanned_out(outbox: Outbox) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_WAIT):
            while (await outbox.admin.counts())["undelivered"]:  # noqa: ASYNC110  # no event announces the end
                await asyncio.sleep(0.01)


async def _until_settled(outbox: Outbox) -> None:
    """Wait until no row is due, and no row waits for a retry."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_WAIT):
            while True:
                drained = await outbox.drain()
                counts = await outbox.admin.counts()
                if not (counts["PENDING"] or counts["FAILED"] or drained.fanned_out or drained.succeeded):
                    return
                await asyncio.sleep(0.01)


# --- in words ------------------------------------------------------------------------------------


def _leaves_behind(made_eventlog: bool) -> str:
    if made_eventlog:
        return "Every table that the demo made is removed again."
    return "The tables and rows that the demo made are removed; the eventlog was there before, and stays."


# --- where ---------------------------------------------------------------------------------------


@contextmanager
def _somewhere(database: str | None) -> Iterator[str]:
    """Yield the URL of the database. Each version would have its own SQLite in memory, so a file replaces memory."""
    if database and not database.rstrip("/").endswith((":", ":memory:")):
        _refuse_no_database(database)
        yield database
        return
    with tempfile.TemporaryDirectory(prefix="outboxio-demo-") as directory:
        yield f"sqlite:///{Path(directory) / 'wallets.db'}"


def _refuse_no_database(url: str) -> None:
    """PostgreSQL has a default database. MySQL and MariaDB would accept outboxio's tables, and refuse the demo's."""
    parts = urlsplit(url)
    if parts.scheme in _SERVERS and not parts.path.strip("/"):
        raise ConfigurationError(
            f"{_shown(url)} names no database for the tables of the demo; make one, and give it as "
            f"{parts.scheme}://user:password@host/database"
        )


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Keep the log quiet: the story shows the failures; without a log handler Python would print the log too."""
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
