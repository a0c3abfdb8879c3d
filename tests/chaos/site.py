"""The servers of chaos runs: a private server for each database, which a run may stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from tests.chaos.arena import Place, RestartableServer
from tests.kit.private_servers import pgbouncer_to, private_server
from tests.kit.servers import Server

SCHEMES = {
    "postgres": "postgresql", "mysql": "mysql", "mariadb": "mariadb", "sqlite": "sqlite", "pgbouncer": "postgresql",
}  # fmt: skip
DIALECT_OF = {"pgbouncer": "postgres"}  # whose actions go through it, in transaction mode


class Site(Struct, frozen=True):
    """A private server, which a run may stop, and its address."""

    database: str
    server: Server
    restartable: RestartableServer | None = None
    bouncer: str | None = None

    def place(self, url: str, folder: Path) -> Place:
        """A fresh database of the server."""
        through = None if self.bouncer is None else urlsplit(self.bouncer)._replace(path=urlsplit(url).path).geturl()
        return Place(url, folder, self.restartable, through)


@contextmanager
def site(database: str) -> Iterator[Site]:
    if database == "sqlite":
        yield Site(database, Server(database, 3, "sqlite://", "this Python"))
        return
    with ExitStack() as ends:
        dialect, private = (
            DIALECT_OF.get(database, database),
            ends.enter_context(private_server(f"{SCHEMES[database]}://")),
        )
        bouncer = ends.enter_context(pgbouncer_to(private.url)) if database == "pgbouncer" else None
        yield Site(database, Server(dialect, 0, private.url, "private"), private, bouncer)
