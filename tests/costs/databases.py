"""Databases for the command, which runs outside of pytest."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.costs.measure import Cost, measure
from tests.kit.servers import DIALECTS, Servers


def measured(dialect: str) -> dict[str, Cost] | None:
    """The costs on a dialect; ``None`` if this machine has no such database."""
    with fresh_database(dialect) as url:
        return None if url is None else measure(dialect, url)


@contextmanager
def fresh_database(dialect: str) -> Iterator[str | None]:
    """The URL of an empty database on the first server of a dialect; ``None`` if there is no server."""
    servers = Servers.find({**os.environ, "OUTBOXIO_TEST_ONLY": dialect})
    with closing(servers), tempfile.TemporaryDirectory() as folder:
        slot = servers.slots[0]
        if not slot.offers:
            yield None
            return
        with DIALECTS[dialect].fresh_database(servers.take(slot), Path(folder)) as url:
            yield url
