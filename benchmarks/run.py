"""Execute a single run of outboxio or of a bare pipeline, in a fresh process: ``python -m benchmarks.run TASK``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks import bare, bare_mysql, bare_postgres, bare_sqlite, ours, scale, under_load
from benchmarks.task import Figures, Task, answer

Run = Callable[[Task], Awaitable[Figures]]

OURS: dict[str, Run] = {
    "drain": ours.drain,
    "fanout": ours.fanout,
    "execute": ours.execute,
    "latency": under_load.latency,
    "sustained": under_load.sustained,
    "backlog": under_load.backlog,
    "produce": under_load.produce_for_another,
    "scale": scale.scale,
    "scale-beside": scale.scale,
    "scale-worker": scale.work,
}


async def _bare(task: Task) -> Figures:
    if task.scenario == "execute":
        async with ours.empty_outbox(task.url):
            pass
        return await bare.execute(_writer(task), task)
    if task.scenario == "sustained":
        return await under_load.sustained_bare(_tables(task), task)
    return await bare.drain(_tables(task), task, dispatching=task.scenario == "drain")


def _tables(task: Task) -> bare.Tables:
    match task.dialect:
        case "postgres":
            return bare_postgres.Tables(task.url)
        case "sqlite":
            return bare_sqlite.Tables(task.url)
        case _:
            return bare_mysql.Tables(task.url, task.dialect)


def _writer(task: Task) -> bare.Writer:
    match task.dialect:
        case "postgres":
            return bare_postgres.Writer(task.url)
        case "sqlite" if task.contestant == "by-hand":
            return bare_sqlite.StatementByStatement(task.url)
        case "sqlite":
            return bare_sqlite.InOneVisit(task.url)
        case _:
            return bare_mysql.Writer(task.url)


def main() -> None:
    task = Task.from_arguments()
    logging.getLogger("outboxio").addHandler(logging.NullHandler())  # warnings are dropped, errors are raised
    if "command" in task.options:
        run = partial(scale.scale_peer, task)
    else:
        run = partial(OURS[task.scenario], task) if task.contestant == "outboxio" else partial(_bare, task)
    answer(asyncio.run(run()))  # type: ignore[arg-type]  # each is a coroutine function


if __name__ == "__main__":
    main()
