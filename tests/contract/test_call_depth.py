"""How many of outboxio's functions lie between a caller and the driver: whoever follows an event reads each of them.

The stack is read when a statement is sent to the driver. On SQLite statements run in a thread: its functions count, and
so do the functions in which a task waits for the thread.
"""

from __future__ import annotations

import asyncio
import gc
import re
import sqlite3
import sys
from asyncio import selector_events
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import AsyncGeneratorType, CodeType, FrameType
from typing import Any
from urllib.parse import urlsplit

import outboxio
from outboxio import EventEnvelope, Outbox, Settings
from tests.kit.app import Emit, MoneyDeposited, eventually
from tests.kit.marks import needs_asyncpg

PACKAGE = f"{Path(outboxio.__file__).parent}/"

WRITE = re.compile(rb"INSERT\s+INTO\s+[\w.`\"]*events\b", re.IGNORECASE)
FAN_OUT = re.compile(rb"INSERT\s+(?:IGNORE\s+)?INTO\s+[\w.`\"]*event_notifications\b", re.IGNORECASE)
SETTLE = re.compile(rb"UPDATE\s+[\w.`\"]*event_notifications\b", re.IGNORECASE)

#: The maximum number of outboxio's functions, by scheme: from ``execute`` to the INSERT of the event; from
#: ``Fanout.run_once`` to the INSERT of the notification; from ``Settler.settle_once`` to the UPDATE of the outcome. The
#: loop of the rounds does not count.
LIMITS = {"postgresql": (5, 5, 5), "mysql": (6, 5, 5), "mariadb": (6, 5, 5), "sqlite": (7, 5, 5)}

MOST_TO_A_HANDLER = 3  # from the worker that takes a run to the first line of the handler


class Stacks:
    """outboxio's functions on the stack when a statement was sent, by the pattern that the statement matches."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.found: dict[re.Pattern[bytes], list[str]] = {}
        self._waiting: dict[re.Pattern[bytes], str] = {}

    def await_in(self, pattern: re.Pattern[bytes], task: str) -> None:
        """The task whose name starts like this waits for matching statements."""
        self._waiting[pattern] = task

    def sent(self, statement: bytes, frame: FrameType | None, *, in_thread: bool = False) -> None:
        for pattern, task in self._waiting.items():
            if pattern not in self.found and pattern.search(statement):
                current = None if in_thread else asyncio.current_task()
                waits_elsewhere = current is None or not current.get_name().startswith(task)
                self.found[pattern] = (_awaited_in(task, self.loop) if waits_elsewhere else []) + _on_stack(frame)


def _on_stack(frame: FrameType | None) -> list[str]:
    """outboxio's functions on the stack, the outermost first."""
    found = []
    while frame is not None:
        found += _ours(frame.f_code)
        frame = frame.f_back
    return found[::-1]


def _awaited_in(name: str, loop: asyncio.AbstractEventLoop) -> list[str]:
    """outboxio's functions in which a task waits, the outermost first."""
    (task,) = [task for task in asyncio.all_tasks(loop) if task.get_name().startswith(name)]
    found: list[str] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        if type(waiting).__name__.startswith("async_generator_"):  # an anext() or athrow() hides its generator
            (waiting,) = [held for held in gc.get_referents(waiting) if isinstance(held, AsyncGeneratorType)]
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(waiting, f"{kind}_code")), None)
        if kind is None:
            break
        found += _ours(getattr(waiting, f"{kind}_code"))
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return found


def _ours(code: CodeType | None) -> list[str]:
    if code is None or not code.co_filename.startswith(PACKAGE) or code.co_name in ("<lambda>", "<genexpr>"):
        return []
    return [f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname}"]


@contextmanager
def stacks() -> Iterator[Stacks]:
    """Read the stack whenever a statement is sent. Only connections opened within the block are watched."""
    seen = Stacks()
    transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    write, connect = transport.write, sqlite3.connect

    def watched_write(self: Any, data: Any) -> None:
        seen.sent(bytes(data), sys._getframe(1))
        write(self, data)

    def watched_connect(*args: Any, **options: Any) -> Any:
        class Connection(options.get("factory", sqlite3.Connection)):  # type: ignore[misc]  # of the requested class
            def execute(self, sql: str, *parameters: Any) -> Any:
                seen.sent(sql.encode(), sys._getframe(1), in_thread=True)
                return super().execute(sql, *parameters)

            def executemany(self, sql: str, *parameters: Any) -> Any:
                seen.sent(sql.encode(), sys._getframe(1), in_thread=True)
                return super().executemany(sql, *parameters)

        return connect(*args, **{**options, "factory": Connection})

    transport.write, sqlite3.connect = watched_write, watched_connect
    try:
        yield seen
    finally:
        transport.write, sqlite3.connect = write, connect


@needs_asyncpg
async def test_one_event_passes_few_functions_from_a_call_to_the_driver(database_url: str) -> None:
    at_first_line: list[list[str]] = []
    limits = LIMITS[urlsplit(database_url).scheme.partition("+")[0]]
    with stacks() as seen:
        outbox = Outbox(database_url, namespace="app", settings=Settings(notify=False))

        @outbox.handler(MoneyDeposited, name="receipt")
        async def receipt(envelope: EventEnvelope[MoneyDeposited]) -> None:
            at_first_line.append(_on_stack(sys._getframe()))

        async with outbox:
            await outbox.migrate()
            seen.await_in(WRITE, "the test")
            asyncio.current_task().set_name("the test")  # type: ignore[union-attr]
            await outbox.executor.execute(Emit((1,)))
            seen.await_in(FAN_OUT, "outboxio fan-out")
            seen.await_in(SETTLE, "outboxio outcomes")
            async with outbox.running():
                await eventually(lambda: SETTLE in seen.found)

    report = "\n\n".join("\n".join(stack) for stack in (*seen.found.values(), at_first_line[0]))
    for pattern, limit in zip((WRITE, FAN_OUT, SETTLE), limits, strict=True):
        counted = [function for function in seen.found[pattern] if not function.startswith("loops/")]
        assert len(counted) <= limit, report
    assert len(at_first_line[0]) <= MOST_TO_A_HANDLER, report
