"""The handoff on MySQL and MariaDB: rows go to the dispatcher before the COMMIT that stores them (decision 16).

A single message makes the notifications, reads the due rows among the notifications, marks the events and commits. The
dispatcher gets the rows as soon as the driver has read the rows. The answer of COMMIT comes later, because the server
waits for the disk. If COMMIT fails, the handlers have run for rows that do not exist: the events are fanned out again,
and the handlers run again, as after a lost outcome.
"""

from __future__ import annotations

import asyncio
from typing import Any

from outboxio.model.notification import Handoff
from outboxio.storage.mysql import driver
from outboxio.storage.mysql.columns import BY_EVENT
from outboxio.storage.mysql.connection import Arguments, limit_of
from outboxio.storage.mysql.due_rows import AS_ONE, DOCUMENT, as_notifications
from outboxio.storage.mysql.flavour import Server

FEW_MADE = 250  # notifications at most that come as a row each, where an aggregate needs a table in a file (MariaDB)
FEWEST_MADE = 10  # the same where an aggregate needs no file: so few rows come sooner by themselves

# NO_MRR: the rows are in memory, so that MySQL need not sort the places of the rows before the read.
JUST_MADE_FEW = f"""
SELECT /*+ NO_MRR(n) */ {DOCUMENT} AS document FROM {BY_EVENT}
WHERE n.event_id IN ({{ids}}) AND n.handler_name IN ({{names}}) AND n.state = 'PENDING' AND n.next_retry_at <= %(now)s
LIMIT {{most}}
"""
JUST_MADE = f"{AS_ONE} FROM ({JUST_MADE_FEW}) d"


def find_just_made(ids: str, events: int, handoff: Handoff, server: Server) -> tuple[str, dict[str, Any]]:
    """The statement that reads the notifications of ``events`` events for the handoff, with the arguments."""
    names = {f"to{number}": name for number, name in enumerate(handoff.names)}
    listed = ", ".join(f"%({name})s" for name in names)
    as_rows = events * len(names) <= (FEW_MADE if server.flavour.aggregates_in_files else FEWEST_MADE)
    return (JUST_MADE_FEW if as_rows else JUST_MADE).format(ids=ids, names=listed, most=handoff.most), names


async def execute_handing_over(
    connection: Any, message: str, args: Arguments, handoff: Handoff, reads: int = 0
) -> tuple[list[int], list[list[tuple[Any, ...]]]]:
    """Run a message that makes notifications, and hand over the rows as soon as the driver has read the rows.

    The first ``reads`` results with rows are not notifications. Returns the number of rows that each later statement
    has changed, and the rows of the first ``reads`` results.
    """
    async with asyncio.timeout(limit_of(connection)):
        cursor = driver.cursor(connection, driver.QuietCursor)
        await cursor.execute(message, args)
        counts, found, has_more = list[int](), list[list[tuple[Any, ...]]](), True
        while has_more:
            if cursor.description is None:
                if len(found) == reads:
                    counts.append(int(cursor.rowcount))
            elif len(found) < reads:
                found.append(list(driver.rows(cursor)))
            else:
                handoff.hand(as_notifications(driver.rows(cursor)) or ())
            has_more = await cursor.nextset()
    return counts, found
