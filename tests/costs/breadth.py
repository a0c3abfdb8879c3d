"""``python -m tests.costs.breadth``: how many files and functions of outboxio a reader enters to follow one path.

On SQLite, because its whole code is in this process. Everything is done once before it is counted, so that opening
connections and compiling statements do not count. Functions in SQLite's threads count on Python 3.12 and later.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

import outboxio
from outboxio import Event, EventEnvelope, Filter, Outbox, RetryPolicy
from outboxio.cli.app import app
from outboxio.dashboard import Dashboard, allow_all
from tests.kit.dashboards import browser, send_form

PACKAGE = f"{Path(outboxio.__file__).parent}/"
DEAD = Filter(states=("DEAD",))


class Paid(Event):
    amount: int


class Paths:
    """The functions that were entered on each path."""

    def __init__(self) -> None:
        self.found: dict[str, set[CodeType]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the functions that the block enters, in all threads."""
        entered = self.found[name] = set[CodeType]()

        def profile(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
                entered.add(code)

        getattr(threading, "setprofile_all_threads", threading.setprofile)(profile)
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    async def second(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        """Do something twice, and count the second time."""
        await work()
        with self.of(name):
            await work()

    def table(self) -> Table:
        table = Table("path", "files", "functions")
        for name, entered in self.found.items():
            files = {code.co_filename for code in entered}
            table.add_row(name, f"{len(files)}", f"{len(entered)}")
        return table


async def _in_code(paths: Paths, url: str) -> None:
    outbox = Outbox(url, namespace="breadth")

    @outbox.handler(Paid, name="mail", retry=RetryPolicy(max_attempts=1))
    async def mail(envelope: EventEnvelope[Paid]) -> None:
        if envelope.event.amount < 0:
            raise ValueError("no address")

    async def pay(amount: int = 1) -> None:
        async with outbox.transaction("Pay") as tx:
            tx.emit(Paid(amount))

    async def retried() -> None:
        await outbox.admin.retry(DEAD)

    async def failed() -> None:
        await pay(-1)
        await outbox.drain()

    async with outbox:
        await outbox.migrate()
        await paths.second("an action", pay)
        await outbox.drain()
        await pay()
        with paths.of("a drain of one event"):
            await outbox.drain()
        await failed()
        await retried()
        await outbox.drain()
        with paths.of("retry by filter, from code"):
            await retried()
        await outbox.drain()
        async with browser(Dashboard(outbox, authorize=allow_all)) as client:

            async def retried_on_pages() -> None:
                for sure, status in (({}, 200), ({"sure": "yes"}, 303)):
                    answer = await send_form(client, "/operations/retry", {"state": "DEAD", **sure}, page="/dead")
                    assert answer.status_code == status, answer.text

            await retried_on_pages()
            await outbox.drain()
            with paths.of("retry by filter, in the dashboard"):
                await client.get("/dead")
                await retried_on_pages()
        await outbox.drain()


def main() -> None:
    """Print the table."""
    paths = Paths()
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/breadth.db"
        asyncio.run(_in_code(paths, url))
        arguments = ["retry", "--state", "DEAD", "--database", url, "--namespace", "breadth", "--yes"]
        CliRunner().invoke(app, [*arguments, "--dry-run"])
        with paths.of("retry by filter, from the command line"):
            result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    Console().print(paths.table())


if __name__ == "__main__":
    main()
