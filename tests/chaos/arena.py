"""The environment of a chaos run: a database, processes that use it, and a proxy in front of each process."""

from __future__ import annotations

import asyncio
import fcntl
import json
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import aiomysql
import asyncpg
from msgspec import Struct

from outboxio import Outbox
from tests.chaos.case import TERMINAL, Final, Owed, Stored
from tests.chaos.history import History
from tests.kit.app import Look, eventually, opened
from tests.kit.inside import database_of
from tests.kit.processes import Worker
from tests.kit.proxy import Proxy, proxy_to
from tests.kit.server_actions import ServerActions, actions_on

HEARTBEAT = 0.5
HANDLER_TIMEOUT = 3.0
SETTINGS = {
    "lock_heartbeat": HEARTBEAT, "handler_timeout": HANDLER_TIMEOUT, "shutdown_timeout": 3, "concurrency": 20,
    "fanout_poll_delay": 0.2, "handling_poll_delay": 0.2, "purge_enabled": False,
}  # fmt: skip
STARTING_TAKES_AT_MOST = 30.0
LEAVING_TAKES_AT_MOST = 30.0
KEYS = 6
OLDER_RUNS = "shared"
"""The handler that a process of an older version runs."""

TABLES = (
    "CREATE TABLE chaos_actions (id VARCHAR(36) PRIMARY KEY)",
    "CREATE TABLE chaos_effects (handler VARCHAR(100) NOT NULL, event VARCHAR(36) NOT NULL)",
    "CREATE TABLE chaos_keys (id VARCHAR(10) PRIMARY KEY, moved INT NOT NULL)",
    "CREATE TABLE chaos_switches (name VARCHAR(20) PRIMARY KEY, value VARCHAR(20) NOT NULL)",
    "INSERT INTO chaos_switches VALUES ('refuses', 'nothing')",
    *(f"INSERT INTO chaos_keys VALUES ('{key}', 0)" for key in range(KEYS)),
)
_IS_REFUSED = (
    "EXISTS (SELECT 1 FROM {}chaos_switches WHERE name = 'refuses' AND "
    "(value = 'all' OR value = 'failures' AND NEW.state IN ('FAILED', 'DEAD')))"
)
#: What makes a database report a full disk while the switch is on.
REFUSING = {
    "postgres": (
        "CREATE FUNCTION chaos_refuse() RETURNS trigger LANGUAGE plpgsql AS $body$ BEGIN IF "
        + _IS_REFUSED.format("public.")
        + " THEN RAISE EXCEPTION 'No space left on device' USING ERRCODE = '53100'; END IF; RETURN NEW; END $body$",
        "CREATE TRIGGER chaos_refuse BEFORE UPDATE ON {event_notifications} FOR EACH ROW EXECUTE FUNCTION "
        "chaos_refuse()",
    ),
    "mysql": (
        "CREATE TRIGGER eventlog.chaos_refuse BEFORE UPDATE ON {event_notifications} FOR EACH ROW BEGIN IF "
        + _IS_REFUSED.format("DATABASE.") + " THEN SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1114, "
        "MESSAGE_TEXT = 'The table is full'; END IF; END",
    ),
    "sqlite": (
        "CREATE TRIGGER chaos_refuse BEFORE UPDATE ON {event_notifications} WHEN " + _IS_REFUSED.format("")
        + " BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END",
    ),
}  # fmt: skip
REFUSING["mariadb"] = REFUSING["mysql"]


class RestartableServer(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


class Place(Struct, frozen=True):
    """A database and its addresses."""

    url: str
    folder: Path
    server: RestartableServer | None = None
    """The server, if the run may stop and start it."""
    through: str | None = None
    """The URL that actions use, if they go through something that shares server sessions."""


class Network:
    """All connections of a process to the database; a network fault affects all of them."""

    def __init__(self, proxies: Sequence[Proxy]) -> None:
        self._proxies = proxies

    def cut(self) -> int:
        return sum(proxy.cut() for proxy in self._proxies)

    def cut_at(self, words: bytes, *, lets_through: bool) -> None:
        for proxy in self._proxies:
            proxy.cut_at(words, lets_through=lets_through)

    def stall(self) -> None:
        for proxy in self._proxies:
            proxy.stall()

    def resume(self) -> None:
        for proxy in self._proxies:
            proxy.resume()

    def delay(self, seconds: float) -> None:
        for proxy in self._proxies:
            proxy.delay(seconds)


class Actor(Worker):
    """A process of the run, and the network between it and the database."""

    name: str
    program: str
    network: Network

    def send(self, what: str, **details: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **details}).encode() + b"\n")

    async def ended(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        return await self._process.wait()

    async def is_gone_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended(), seconds)
            return True
        return False


class Arena:
    """Starts processes, injects faults, and inspects the remaining state."""

    heartbeat = HEARTBEAT
    handler_timeout = HANDLER_TIMEOUT

    def __init__(
        self, place: Place, seed: int, rate: float, handlers: str = "all", settings: Mapping[str, Any] = SETTINGS
    ) -> None:
        self.server = place.server
        self.folder = place.folder
        self.look = Look(place.url)
        self.dialect = self.look.dialect
        self.workers: list[Actor] = []
        self.producers: list[Actor] = []
        self.older: list[Actor] = []
        self.history = History(place.folder, "arena")
        self.left: list[str] = []
        self._url = place.url
        self._through = place.through
        self._seed = seed
        self._config = {"rate": rate, "handlers": handlers, "tasks": 4, "settings": settings}
        self._numbers = count(1)
        self._busy: set[Actor] = set()
        self._ends = AsyncExitStack()
        self._watchers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self._ends.aclose()
        await asyncio.gather(*self._watchers)
        self.history.close()

    @property
    def acts(self) -> ServerActions:
        return actions_on(self._url)

    # --- before ----------------------------------------------------------------------------------

    async def prepare(self, *, refuses: bool) -> None:
        """Create the tables; with ``refuses``, also the switches that let the database refuse outcomes."""
        async with opened(Outbox(self._url, namespace="app")):
            pass
        database = urlsplit(self._url).path[1:]
        for statement in (*TABLES, *(REFUSING[self.dialect] if refuses else ())):
            await self.look.fetch(statement.replace("DATABASE.", f"{database}."))

    async def begin_with_older(self) -> None:
        """Start a process of an older version, which holds partition 0 of a handler that has several partitions."""
        assert self.dialect == "postgres", "the older version is for PostgreSQL only"
        await self.look.fetch(
            "INSERT INTO {handler_partitions} VALUES ('app', $1, 8, 8, 8, now() AT TIME ZONE 'UTC')", OLDER_RUNS
        )
        await self._start("older", self.older, handler=OLDER_RUNS)

    async def older_leaves(self) -> None:
        for older in self.older:
            await self.leave(older)

    async def begin(self, workers: int, producers: int) -> None:
        """Start the instances, and, when all handlers are announced, the producers."""
        await asyncio.gather(*(self._start("worker", self.workers) for _ in range(workers)))
        await asyncio.gather(*(self._start("producer", self.producers) for _ in range(producers)))

    async def _start(self, program: str, among: list[Actor], **config: Any) -> Actor:
        """Start a process until it runs: while the database is down, the start fails."""
        async with asyncio.timeout(STARTING_TAKES_AT_MOST):
            while True:
                actor = await self._start_once(program, **config)
                with suppress(AssertionError):  # it is gone
                    await actor.until("running", timeout=STARTING_TAKES_AT_MOST)
                    among.append(actor)
                    return actor
                await asyncio.sleep(1)

    async def _start_once(self, program: str, **more: Any) -> Actor:
        number = next(self._numbers)
        name = f"{program}-{number}"
        urls = [self._url] if self._through is None else [self._through, self._url]
        proxies = [await self._ends.enter_async_context(proxy_to(url)) for url in urls if not self.look.is_file]
        ways = [proxy.url for proxy in proxies] or urls
        config = {
            "name": name, "folder": str(self.folder), "seed": self._seed * 1000 + number,
            "database": ways[0], "direct": ways[-1] if self._through else None, **self._config, **more,
        }  # fmt: skip
        actor = await Actor.start_program(f"tests.chaos.{program}", **config)
        assert isinstance(actor, Actor)
        actor.name, actor.program, actor.network = name, program, Network(proxies)
        self._ends.push_async_callback(actor.end)
        watcher = asyncio.create_task(self._watch(actor))
        self._watchers.add(watcher)
        return actor

    async def _watch(self, actor: Actor) -> None:
        self.history.write("exit", number=await actor.ended(), how=actor.name)

    # --- what faults do --------------------------------------------------------------------------

    @asynccontextmanager
    async def victim(self, chance: Random) -> AsyncIterator[Actor]:
        """An instance without a fault at present."""
        actor = chance.choice(self.workers)
        while actor in self._busy:
            await asyncio.sleep(0.05)
            actor = chance.choice(self.workers)
        self._busy.add(actor)
        try:
            yield actor
        finally:
            self._busy.discard(actor)

    def any_process(self, chance: Random) -> Actor:
        """A process that has connections."""
        return chance.choice([*self.workers, *self.producers])

    async def disturb(self, chance: Random, what: str, seconds: float) -> str:
        """Send a command to an instance."""
        async with self.victim(chance) as actor:
            actor.send(what, seconds=seconds)
            return f"{actor.name} for {seconds:.1f} s"

    async def replace(self, actor: Actor, **config: Any) -> None:
        """Wait for the end of an instance, and start a successor."""
        await actor.ended()
        among = self.workers if actor.program == "worker" else self.producers
        await self._start(actor.program, among, **config)
        among.remove(actor)

    async def join(self) -> Actor:
        """Start one more instance."""
        return await self._start("worker", self.workers)

    async def leave_for_good(self, actor: Actor, *, killed: bool) -> None:
        """Let an instance leave, or kill it, without a successor."""
        if killed:
            actor.kill()
            await actor.ended()
        else:
            await self.leave(actor)
        self.workers.remove(actor)

    async def repartition(self, handler: str, number: int) -> None:
        """Change the number of partitions of a handler, as an operator would."""
        async with Outbox(self._url, namespace="app") as outbox:
            await outbox.admin.partitions(handler, number)

    async def leave(self, actor: Actor) -> None:
        """Let an instance leave, cleanly or not: the database may be unavailable."""
        actor.terminate()
        await self._until_left(actor)
        actor.send("bye")
        await actor.ended()

    async def _until_left(self, actor: Actor) -> None:
        try:
            await actor.until_it(lambda: bool(actor.of("left")) or actor.is_gone, timeout=LEAVING_TAKES_AT_MOST)
        except AssertionError:
            self.left.append(f"{actor.name} has not left within {LEAVING_TAKES_AT_MOST:g} s")
            actor.kill()

    async def session_ids(self) -> list[int]:
        sessions = await self.acts.sessions()
        return [int(session.get("pid") or session["Id"]) for session in sessions]

    async def hold_snapshot(self, seconds: float) -> None:
        """Read a row in a transaction that stays open."""
        async with Outbox(self._url, namespace="somebody") as outbox:
            database = database_of(outbox)
            async with database.session() as session:
                await session.begin()
                await session.fetch(f"SELECT count(*) FROM {self.look.table('events')}", ())
                await asyncio.sleep(seconds)
                await session.rollback()

    async def switch(self, name: str, value: str) -> None:
        """Set a switch in the database as soon as it is up and accepts writes."""

        async def is_turned() -> bool:
            with suppress(*self.acts.cut, sqlite3.OperationalError):
                await self.look.fetch(f"UPDATE chaos_switches SET value = '{value}' WHERE name = '{name}'")
                return True
            return False

        await eventually(is_turned, timeout=STARTING_TAKES_AT_MOST)

    # --- after -----------------------------------------------------------------------------------

    async def stop_producers(self) -> None:
        for producer in self.producers:
            producer.terminate()
        for producer in self.producers:
            await self._until_left(producer)
            await producer.ended()

    async def is_quiet(self) -> bool:
        """True if no work is left. One statement, hence one snapshot: between two, fan-out would move rows unseen."""
        ended = ", ".join(f"'{state}'" for state in sorted(TERMINAL))
        work_left = f"""SELECT
            (SELECT count(*) FROM {{events}} WHERE delivered = FALSE AND event_type IS NOT NULL)
            + (SELECT count(*) FROM {{event_notifications}} WHERE state NOT IN ({ended}))"""
        try:
            return not await self.look.value(work_left)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, aiomysql.Error, sqlite3.OperationalError):
            return False  # a busy or starting server closes the connection; the next check decides

    async def end(self) -> None:
        """Let every instance leave, inspect the remaining state, and release the instances."""
        for worker in self.workers:
            with suppress(ProcessLookupError):  # it has ended by itself, as its exit code shows below
                worker.terminate()
        await asyncio.gather(*map(self._until_left, self.workers))
        self.left += await self._leftovers()
        for worker in self.workers:
            worker.send("bye")
            if code := await worker.ended():
                self.left.append(f"{worker.name} has not left in good order, but with {code}")

    async def _leftovers(self) -> list[str]:
        if self.look.is_file:
            return [f"the lock file {lock} is held" for lock in _held(Path(urlsplit(self._url).path[1:] + ".locks"))]
        with suppress(AssertionError):  # the server detects a closed connection a little later
            await eventually(self._sessions_are_gone, timeout=5)
        sessions, locks = await self.acts.sessions(), await self.acts.locks()
        return [f"the session {session}" for session in sessions] + [f"the lock {lock}" for lock in locks]

    async def _sessions_are_gone(self) -> bool:
        return not await self.acts.sessions() and not await self.acts.locks()

    async def final(self) -> Final:
        """The rows of the database at the end, and other leftovers."""
        return Final(
            events=[
                Stored(
                    id=str(row["id"]), action=str(row["action_id"]), type=row["event_type"],
                    cause=str(row["causation_id"] or ""), delivered=bool(row["delivered"]),
                )
                for row in await self.look.fetch("SELECT * FROM {events} WHERE event_type IS NOT NULL")
            ],
            notifications=[
                Owed(
                    id=str(row["id"]), event=str(row["event_id"]), handler=row["handler_name"], state=row["state"],
                    has_reason=row["errors"] not in ("[]", [], None),
                )
                for row in await self.look.fetch("SELECT * FROM {event_notifications}")
            ],
            effects=[(row["handler"], row["event"]) for row in await self._rows("chaos_effects", "handler, event")],
            actions=[row["id"] for row in await self._rows("chaos_actions", "id")],
            left=self.left,
        )  # fmt: skip

    async def _rows(self, table: str, columns: str) -> Sequence[dict[str, Any]]:
        return await self.look.fetch(f"SELECT {columns} FROM {table}")


def _held(folder: Path) -> list[str]:
    return [lock.name for lock in folder.iterdir() if _is_held(lock)]


def _is_held(lock: Path) -> bool:
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
