"""The port through which operator tables are read and written, on every database."""

from __future__ import annotations

from datetime import datetime

from outboxio import Outbox
from outboxio.storage.statement import Jumps, Port, Query
from tests.kit.app import Look
from tests.kit.inside import database_of
from tests.kit.rows import EPOCH, Row, at, insert

DATES = Query(
    """
SELECT :name, n.next_retry_at FROM {table event_notifications} n
WHERE n.namespace = :namespace AND n.handler_name = :name AND n.next_retry_at >= :since
ORDER BY n.next_retry_at LIMIT :most
""",
    tuple[str, datetime],
    each="name text, since timestamp",
)
NAMES = Jumps("""
SELECT n.handler_name FROM {table event_notifications} n WHERE n.namespace = :namespace AND n.handler_name > :start
ORDER BY n.handler_name LIMIT 1
""")


def port_of(outbox: Outbox) -> Port:
    port: Port = database_of(outbox).operations._port
    return port


async def test_a_query_runs_for_each_set_of_values(outbox: Outbox, look: Look) -> None:
    names = [f"it's {number}" for number in range(40)]
    await insert(look, [Row(handler_name=name, next_retry_at=at(second)) for name in names for second in (1, 2, 3)])
    port, each = port_of(outbox), [{"name": name, "since": at(2)} for name in ("nobody", *names)]

    assert await port.fetch_each(DATES, each, namespace="app", most=1) == [(name, at(2)) for name in names]
    two = await port.fetch_each(DATES, [*each[1:2], {"name": names[0], "since": EPOCH}], namespace="app", most=9)
    assert two == [(names[0], at(second)) for second in (2, 3, 1, 2, 3)]
    assert await port.fetch_each(DATES, [], namespace="app", most=1) == []


async def test_jumps_find_every_value_once_and_in_order(outbox: Outbox, look: Look) -> None:
    names = [f"it's {number:02}" for number in range(70)]
    await insert(look, [Row(handler_name=name) for name in names for _ in range(2)])

    assert await port_of(outbox).fetch(NAMES, namespace="app") == names
    assert await port_of(outbox).fetch(NAMES, namespace="nobody's") == []
