"""Chunks of bulk operations, on every database: what ``retry`` and ``skip`` change, with the operation record."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal
from uuid import UUID, uuid4

import msgspec
import pytest
from msgspec.structs import asdict

from outboxio import Outbox
from outboxio.model.notification import NotificationRecord, State
from outboxio.model.operating.groups import PageCursor, Search
from outboxio.storage.protocols.operating import BulkOperation, ChunkResult
from outboxio.storage.tables.scans import END
from outboxio.storage.tables.search import Change
from tests.kit.app import Look
from tests.kit.inside import database_of
from tests.kit.rows import Row, at, insert
from tests.kit.storage import Store

NOW = at(1000)
OPERATION = UUID(int=77)
DEAD = Search(states=(State.DEAD, State.EXPIRED), until=at(500))

Kind = Literal["retry", "skip"]


class Operating:
    """The database of an outbox, with an operation of the worker ``me``."""

    def __init__(self, outbox: Outbox, look: Look) -> None:
        self.database = database_of(outbox)
        self.look = look
        self.store = Store(outbox, look)

    async def begin(self, **values: Any) -> None:
        """Record the operation."""
        row = {
            "id": OPERATION, "namespace": "app", "kind": "retry", "state": "RUNNING", "request": "{}", "actor": "ada",
            "origin": "code", "matched": 0, "done": 0, "refused": 0, "worker": "me", "stop_ordered": False,
            "created_date": at(0), "updated_date": at(0),
        } | values  # fmt: skip
        texts = [f"'{value}'" if not isinstance(value, bool | int) else str(value) for value in row.values()]
        await self.look.fetch(f"INSERT INTO {{operations}} ({', '.join(row)}) VALUES ({', '.join(texts)})")

    async def operation(self) -> dict[str, Any]:
        return (await self.look.fetch("SELECT * FROM {operations}"))[0]

    async def chunk(
        self, kind: Kind, search: Search, after: PageCursor | None = None, limit: int = 1000, worker: str = "me"
    ) -> ChunkResult:
        bulk = BulkOperation(kind, OPERATION, worker, search)
        return await self.database.search.change_chunk("app", bulk, after, limit, NOW)

    async def all_chunks(self, kind: Kind, search: Search, limit: int) -> list[ChunkResult]:
        chunks: list[ChunkResult] = []
        cursor: PageCursor | None = None
        while not chunks or chunks[-1].next is not None:
            chunks.append(await self.chunk(kind, search, cursor, limit))
            cursor = chunks[-1].next
        return chunks

    async def rows(self) -> dict[UUID, NotificationRecord]:
        return {row.id: row for row in await self.store.rows()}


@pytest.fixture
def operating(outbox: Outbox, look: Look) -> Operating:
    return Operating(outbox, look)


def generated() -> list[Row]:
    chance = random.Random(5)
    return [
        Row(
            handler_name=chance.choice(("ledger", "wide")), state=state, attempts=3, ordering_key=chance.choice("ab"),
            updated_date=at(chance.randint(0, 9)), next_retry_at=at(chance.randint(0, 9)),
        )
        for state in (*State, State.DEAD, State.EXPIRED) for _ in range(4)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["retry", "skip"])
async def test_chunks_of_a_bulk_operation_match_the_operation_by_ids(
    operating: Operating, look: Look, kind: Kind
) -> None:
    rows = generated()
    await insert(look, rows)
    await insert(look, [row.but(namespace="twin", event_id=row.event_id, handler_name=f"{row.handler_name}-twin")
                        for row in rows])  # fmt: skip
    if not look.is_file:
        for namespace, name in (("app", "wide"), ("twin", "wide-twin")):
            await look.fetch(
                f"INSERT INTO {{handler_partitions}} VALUES ('{namespace}', '{name}', 16, 16, 16, '{NOW}', NULL, NULL)"
            )
    await operating.begin()
    twins = Store(operating.store.outbox, look, "twin")
    by_ids = getattr(operating.database.stored_notifications, kind)

    chunks = await operating.all_chunks(kind, Search(until=at(500)), 7)
    await by_ids("twin", [row.id for row in await twins.rows()], NOW)

    def without_names(rows: Sequence[NotificationRecord]) -> list[dict[str, Any]]:
        found = []
        for row in rows:
            values = {**asdict(row), "handler_name": row.handler_name.removesuffix("-twin")}
            found.append({name: value for name, value in values.items() if name not in ("id", "namespace", "sequence")})
        return sorted(found, key=lambda values: (values["event_id"], values["handler_name"]))

    assert without_names(await operating.store.rows()) == without_names(await twins.rows())
    refused = 0 if kind == "retry" else 8
    assert sum(chunk.matched for chunk in chunks) == len(rows)
    assert sum(chunk.refused for chunk in chunks) == refused
    assert sum(chunk.done for chunk in chunks) == len(rows) - refused
    assert all(chunk.matched <= 7 for chunk in chunks)
    operation = await operating.operation()
    assert (operation["matched"], operation["done"], operation["refused"]) == (len(rows), len(rows) - refused, refused)


async def test_only_matching_rows_are_changed(operating: Operating, look: Look) -> None:
    rows = generated()
    await insert(look, rows)
    await operating.begin()

    search = Search(states=(State.DEAD,), names=("ledger",), until=at(5))
    await operating.all_chunks("retry", search, 3)

    expected = {row.id for row in rows if row.state == "DEAD" and row.handler_name == "ledger"
                and row.updated_date < at(5)}  # fmt: skip
    assert expected
    assert {row.id for row in (await operating.rows()).values() if row.updated_date == NOW} == expected


async def test_the_cursor_is_written_with_its_chunk_for_the_next_process(operating: Operating, look: Look) -> None:
    rows = [Row(state="DEAD", updated_date=at(number)) for number in range(10)]
    await insert(look, rows)
    await operating.begin()

    first = await operating.chunk("retry", DEAD, None, 4)

    cursor = stored_cursor(await operating.operation())
    assert first.next == cursor
    assert {row.id for row in (await operating.rows()).values() if row.state == "PENDING"} == {
        row.id for row in rows[6:]
    }  # fmt: skip
    await look.fetch("UPDATE {operations} SET worker = 'another'")
    rest = await operating.chunk("retry", DEAD, cursor, 1000, worker="another")
    assert (rest.matched, rest.done, rest.next) == (6, 6, None)
    again = await operating.chunk("retry", DEAD, stored_cursor(await operating.operation()), 1000, worker="another")
    assert (again.matched, again.done, again.next) == (0, 0, None), "the cursor behind the last row"
    assert stored_cursor(await operating.operation()) == END


def stored_cursor(operation: dict[str, Any]) -> PageCursor:
    return msgspec.json.decode(operation["reached"], type=PageCursor)


async def test_a_chunk_run_twice_changes_no_row_twice(operating: Operating, look: Look) -> None:
    await insert(look, [Row(state="DEAD", updated_date=at(number)) for number in range(10)])
    await operating.begin()

    first = await operating.chunk("retry", DEAD, None, 4)
    await look.fetch("UPDATE {event_notifications} SET state = 'DEAD' WHERE state = 'PENDING'")
    again = await operating.chunk("retry", DEAD, None, 4)

    assert (first.done, again.done) == (4, 4)
    pending = [row for row in (await operating.rows()).values() if row.state == "PENDING"]
    assert {row.created_date for row in pending} == {at(0)}
    assert len(pending) == 4, "the second chunk has other rows"


@pytest.mark.parametrize(
    "values",
    [{"state": "DONE"}, {"state": "STOPPED"}, {"stop_ordered": True}, {"worker": "another"}, {"namespace": "another"},
     {"id": uuid4()}],
    ids=lambda values: next(iter(values)),
)  # fmt: skip
async def test_nothing_changes_for_an_operation_taken_over_by_another(
    operating: Operating, look: Look, values: dict[str, Any]
) -> None:
    await insert(look, [Row(state="DEAD")])
    await operating.begin(**values)
    before = await operating.operation()

    for kind in ("retry", "skip"):
        chunk = await operating.chunk(kind, DEAD)
        assert (chunk.matched, chunk.done, chunk.refused, chunk.is_ours) == (0, 0, 0, False)

    assert [row.state for row in (await operating.rows()).values()] == ["DEAD"]
    assert await operating.operation() == before


async def test_a_row_changed_since_it_was_found_is_skipped(operating: Operating, look: Look) -> None:
    rows = [Row(state="DEAD", updated_date=at(number)) for number in range(3)]
    await insert(look, rows)
    await operating.begin()
    await look.fetch(f"UPDATE {{event_notifications}} SET state = 'SUCCEEDED' WHERE id = '{rows[0].id}'")
    await look.fetch(f"UPDATE {{event_notifications}} SET updated_date = '{at(600)}' WHERE id = '{rows[1].id}'")

    found = [str(row.id) for row in rows]
    changed = await operating.database.search.change(
        Change(
            "app",
            BulkOperation("retry", OPERATION, "me", DEAD),
            found,
            PageCursor("dead", "ledger", ("1", "2", "0")),
            NOW,
        )
    )

    assert changed == (1, 1)
    states = {row.id: row.state for row in (await operating.rows()).values()}
    assert states == {rows[0].id: "SUCCEEDED", rows[1].id: "DEAD", rows[2].id: "PENDING"}


async def test_rows_and_record_are_written_together(operating: Operating, look: Look) -> None:
    await insert(look, [Row(state="DEAD")])
    await operating.begin()
    await look.fetch("ALTER TABLE {operations} RENAME COLUMN reached TO elsewhere")

    with pytest.raises(Exception, match="reached"):
        await operating.chunk("retry", DEAD)

    assert [row.state for row in (await operating.rows()).values()] == ["DEAD"]


async def test_a_slow_clock_does_not_make_a_changed_row_match_again(operating: Operating, look: Look) -> None:
    await insert(look, [Row(state="DEAD")])
    await operating.begin()
    late = Search(until=at(2000))

    assert (await operating.chunk("retry", late)).done == 1
    assert (await operating.chunk("retry", late)).matched == 0
    [row] = (await operating.rows()).values()
    assert row.updated_date == at(2000)
    assert (await operating.operation())["updated_date"] in (NOW, f"{NOW}.000000")
