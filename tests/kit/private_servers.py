"""Servers for a single test, which may stop and start the server, and a PgBouncer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest

from tests.kit.background_loop import run_in_background
from tests.kit.mysql import scheme_of
from tests.kit.ports import free_port
from tests.kit.programs import names_in, programs
from tests.kit.servers import (
    DIALECTS,
    POSTGRES_SETTINGS,
    MysqlFamily,
    MysqlPrograms,
    _give_to_server_user,
    _keep_running,
    _mysql_execute,
    _private_directory,
    _ready_postgres,
    _run_as_server_user,
    _tail,
)


class PrivatePostgres:
    """A PostgreSQL that keeps its data when it is stopped."""

    def __init__(self, programs: Path, home: Path) -> None:
        self._programs = programs
        self._home = home
        self._data = home / "data"
        self._port = free_port()
        self._ends = ExitStack()
        self.url = f"postgresql://postgres@127.0.0.1:{self._port}/postgres"
        _run_as_server_user(
            home,
            # -E: with the locale of this machine it might be SQL_ASCII, whose texts psycopg returns as bytes
            [programs / "initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"],
        )

    def start(self) -> None:
        log, here = (
            self._home / "log",
            self._home / "running",
        )  # the server's keeper process removes the folder at its end
        here.mkdir()
        _give_to_server_user(here)
        where = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={self._port}", "-c", "unix_socket_directories="]
        command = [self._programs / "postgres", "-D", self._data, *where, *POSTGRES_SETTINGS]
        _keep_running(self._ends, here, log, signal.SIGINT, command)
        _ready_postgres(self.url, lambda: _tail(log))

    def stop(self) -> None:
        """A fast shutdown: sessions are ended, their transactions are rolled back."""
        self._ends.close()

    def crash(self) -> None:
        """Kill the server without a shutdown: unwritten data is lost."""
        os.kill(int((self._data / "postmaster.pid").read_text().split()[0]), signal.SIGQUIT)
        self._ends.close()


class PrivateMysql:
    """A MySQL or MariaDB that keeps its data when it is stopped."""

    def __init__(self, family: MysqlFamily, programs: MysqlPrograms, home: Path, scheme: str) -> None:
        self._family = family
        self._programs = programs
        self._home = home
        self._port = free_port()
        self._ends = ExitStack()
        self.url = f"{scheme}://root@127.0.0.1:{self._port}/private"
        family.initialise(programs, home)
        self.start()
        run_in_background(_mysql_execute(urlsplit(self.url)._replace(path="/").geturl(), "CREATE DATABASE private"))

    def start(self) -> None:
        here = self._home / "running"  # the server's keeper process removes the folder at its end
        here.mkdir()
        _give_to_server_user(here)
        self._family.keep_running(self._programs, self._ends, self._home, self._port, remove=here)

    def stop(self) -> None:
        """A shutdown: sessions are ended, their transactions are rolled back."""
        self._ends.close()


def _leave_out(reason: str, dialect: str = "postgres") -> NoReturn:
    """Skip, loudly; where the dialect is required, fail."""
    if dialect in names_in(os.environ, "OUTBOXIO_TEST_REQUIRE"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def private_postgres() -> Iterator[PrivatePostgres]:
    """A started PostgreSQL that no test shares."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not folders:
        _leave_out("no PostgreSQL programs below /usr/lib/postgresql: apt-get install postgresql")
    with ExitStack() as ends:
        server = PrivatePostgres(folders[-1], _private_directory(ends))
        ends.callback(server.stop)
        server.start()
        yield server


@contextmanager
def private_server(like: str) -> Iterator[PrivatePostgres | PrivateMysql]:
    """A started server that no test shares, of the dialect of a URL."""
    family = DIALECTS.get(scheme_of(like))
    if not isinstance(family, MysqlFamily):
        with private_postgres() as server:
            yield server
        return
    programs = [each for each in family.programs(os.environ) if each.version >= family.oldest]
    if not programs:
        _leave_out(f"no programs of {family.name} on this machine", family.name)
    with ExitStack() as ends:
        server = PrivateMysql(family, programs[0], _private_directory(ends), urlsplit(like).scheme)
        ends.callback(server.stop)
        yield server


@contextmanager
def pgbouncer_to(url: str) -> Iterator[str]:
    """The URL of a PgBouncer in transaction mode before the server of ``url``."""
    pgbouncer = programs.need("pgbouncer")
    parts, port = urlsplit(url), free_port()
    through = parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}").geturl()
    with ExitStack() as ends:
        home = _private_directory(ends)
        (home / "pgbouncer.ini").write_text(
            f"[databases]\n* = host={parts.hostname} port={parts.port or 5432} user={parts.username}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            "auth_type = any\npool_mode = transaction\nmax_client_conn = 200\n"
            "server_idle_timeout = 1\nserver_login_retry = 1\n"
        )
        _give_to_server_user(home)
        _keep_running(ends, home, home / "log", signal.SIGINT, [pgbouncer, home / "pgbouncer.ini"])
        time.sleep(0.05)
        _ready_postgres(through, lambda: _tail(home / "log"))
        yield through
