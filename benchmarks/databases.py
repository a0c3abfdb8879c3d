"""The databases for the benchmarks: the servers of the tests, but with durable default settings.

The tests run their servers in memory, without durability. Here the files are on a disk: a commit in memory is nearly
free, which would favor the contestant with the most commits. Only the cache sizes differ from the defaults.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec import Struct

from tests.kit import servers as of_tests
from tests.kit.app import Look
from tests.kit.background_loop import run_in_background
from tests.kit.servers import DIALECTS, Mariadb, Mysql, Server, Servers, Slot

# A share of the memory, as the manuals recommend; with the default sizes, pages are evicted within seconds.
GIGABYTES = max(1, min(4, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30 // 4))
POSTGRES_SETTINGS = (f"shared_buffers={GIGABYTES}GB", f"min_wal_size={GIGABYTES}GB", f"max_wal_size={GIGABYTES}GB",
                     "max_connections=200")  # fmt: skip
WAL_FILE = 16 * 2**20  # bytes
DISK = Path("/var/tmp")  # /tmp may be in memory
MYSQL_SETTINGS = (f"--innodb-buffer-pool-size={GIGABYTES}G", "--max-connections=200", "--skip-name-resolve",
                  "--character-set-server=utf8mb4")  # fmt: skip
ONLY_MYSQL = (f"--innodb-redo-log-capacity={GIGABYTES}G", "--mysqlx=OFF")
ONLY_MARIADB = (f"--innodb-log-file-size={GIGABYTES}G",)
DEFAULTS = "all other settings, durability above all, are the server's defaults"

SCHEMES = {"postgresql": "postgres", "postgres": "postgres", "mysql": "mysql", "mariadb": "mariadb", "sqlite": "sqlite"}


class Database(Struct, frozen=True):
    """An available database."""

    id: str
    dialect: str
    version: str
    source: str
    settings: str


class NotHere(Exception):
    """Raised if a database cannot be measured; the message says why."""


def as_they_come() -> None:
    """Make servers started from now on durable and on a disk: in TMPDIR if that is on a disk."""
    of_tests.FAST_PLACES[:] = [] if "TMPDIR" in os.environ else [DISK]
    of_tests.POSTGRES_SETTINGS[:] = [part for setting in POSTGRES_SETTINGS for part in ("-c", setting)]
    of_tests.MYSQL_SETTINGS[:] = MYSQL_SETTINGS
    Mysql.settings, Mariadb.settings = ONLY_MYSQL, ONLY_MARIADB


def choose(url: str | None, only: str | None, environ: Mapping[str, str]) -> list[tuple[Slot, Servers]]:
    """Return the servers to measure: one version of each dialect, or those chosen by id or URL.

    Each server can be stopped separately, so that no two servers need memory at once.
    """
    environment = dict(environ)
    if url:
        dialect = SCHEMES.get(urlsplit(url).scheme)
        if dialect is None:
            raise SystemExit(f"DATABASE={url}: the URL must start with one of {', '.join(SCHEMES)}")
        environment["OUTBOXIO_TEST_ONLY"] = dialect
        if dialect != "sqlite":
            environment[f"OUTBOXIO_TEST_{dialect.upper()}_URL"] = url
    servers = Servers.find(environment)
    if only:
        wanted = {name.strip() for name in only.split(",")}
        found = [slot for slot in servers.slots if {slot.id, slot.dialect} & wanted]
    else:
        found = list(servers.slots)
        if url:
            given = [slot for slot in found if any(o.source.startswith("OUTBOXIO_TEST_") for o in slot.offers)]
            found = given or found
    by_id = {slot.id for slot in found if only and slot.id in only}
    first: dict[str, Slot] = {}
    for slot in found:
        first.setdefault(slot.dialect, slot)
    chosen = [slot for slot in found if slot.id in by_id or first[slot.dialect] is slot]
    return [(slot, Servers([slot], servers.selection)) for slot in chosen]


def take(servers: Servers, slot: Slot, size: str) -> tuple[Server, Database]:
    """Start a server if necessary. Before a full-size run, which fills many log files, fill the log once."""
    try:
        server = servers.take(slot)
    except (
        pytest.skip.Exception,
        pytest.fail.Exception,
    ) as reason:  # the errors of servers that cannot start
        raise NotHere(str(reason)) from None
    with empty(server) as url:
        version = _version(url)
        if slot.dialect == "postgres" and size == "full" and not _is_given(server):
            run_in_background(_use_the_log_once(url))
    return server, Database(slot.id, slot.dialect, version, server.source, _settings(server))


@contextmanager
def empty(server: Server) -> Iterator[str]:
    """Yield the URL of an empty database, and drop the database afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="outboxio-bench-", dir=of_tests.place_of_files()) as directory,
        DIALECTS[server.dialect].fresh_database(server, Path(directory)) as url,
    ):
        yield url


async def _use_the_log_once(url: str) -> None:
    """Fill the log files of a new server, because a server that has run for a while recycles them.

    Creating a log file takes as long as filling one, and every commit waits for the file system during that time.
    """
    look = Look(url)
    files = GIGABYTES * 2**30 // WAL_FILE
    for _ in range(files):
        await look.fetch("SELECT pg_logical_emit_message(FALSE, 'outboxio', 'a file of the log')")
        await look.fetch("SELECT pg_switch_wal()")
    for _ in range(2):  # the files before the last two are recycled
        await look.fetch("CHECKPOINT")


def _version(url: str) -> str:
    look = Look(url)
    ask = {
        "asyncpg": "SELECT current_setting('server_version') AS version",
        "aiomysql": "SELECT VERSION() AS version",
        "sqlite3": "SELECT sqlite_version() AS version",
    }
    return str(run_in_background(look.value(ask[look.driver])))


def _is_given(server: Server) -> bool:
    return server.source.startswith("OUTBOXIO_TEST_")


def _settings(server: Server) -> str:
    if _is_given(server):
        return "a given server, with its own settings"
    match server.dialect:
        case "postgres":
            return f"{', '.join(POSTGRES_SETTINGS)}; {DEFAULTS}"
        case "mysql":
            return f"{' '.join((*MYSQL_SETTINGS, *ONLY_MYSQL))}; {DEFAULTS}"
        case "mariadb":
            return f"{' '.join((*MYSQL_SETTINGS, *ONLY_MARIADB))}; {DEFAULTS}"
        case _:
            return f"journal_mode=WAL, which outboxio sets; {DEFAULTS}"
