"""Pieces of bulk orders, on every database: what ``retry`` and ``skip`` do, with the record of the operation."""

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
from outboxio.model.operating.groups import Place, Search
from outboxio.storage.protocols.operating import BulkOrder, Piece
from outboxio.storage.tables.search import Change
from outboxio.storage.tables.walks import END
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

    async def piece(
        self, kind: Kind, search: Search, after: Place | None = None, limit: int = 1000, worker: str = "me"
    ) -> Piece:
        order = BulkOrder(kind, OPERATION, worker, search)
        return await self.database.search.change_piece("app", order, after, limit, NOW)

    async def all_pieces(self, kind: Kind, search: Search, limit: int) -> list[Piece]:
        pieces: list[Piece] = []
        place: Place | None = None
        while not pieces or pieces[-1].next is not None:
            pieces.append(await self.piece(kind, search, place, limit))
            place = pieces[-1].next
        return pieces

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
async def test_the_pieces_of_an_order_do_what_the_order_by_ids_does(
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

    pieces = await operating.all_pieces(kind, Search(until=at(500)), 7)
    await by_ids("twin", [row.id for row in await twins.rows()], NOW)

    def without_names(rows: Sequence[NotificationRecord]) -> list[dict[str, Any]]:
        found = []
        for row in rows:
            values = {**asdict(row), "handler_name": row.handler_name.removesuffix("-twin")}
            found.append({name: value for name, value in values.items() if name not in ("id", "namespace", "sequence")})
        return sorted(found, key=lambda values: (values["event_id"], values["handler_name"]))

    assert without_names(await operating.store.rows()) == without_names(await twins.rows())
    refused = 0 if kind == "retry" else 8
    assert sum(piece.matched for piece in pieces) == len(rows)
    assert sum(piece.refused for piece in pieces) == refused
    assert sum(piece.done for piece in pieces) == len(rows) - refused
    assert all(piece.matched <= 7 for piece in pieces)
    operation = await operating.operation()
    assert (operation["matched"], operation["done"], operation["refused"]) == (len(rows), len(rows) - refused, refused)


async def test_only_matching_rows_are_changed(operating: Operating, look: Look) -> None:
    rows = generated()
    await insert(look, rows)
    await operating.begin()

    search = Search(states=(State.DEAD,), names=("ledger",), until=at(5))
    await operating.all_pieces("retry", search, 3)

    expected = {row.id for row in rows if row.state == "DEAD" and row.handler_name == "ledger"
                and row.updated_date < at(5)}  # fmt: skip
    assert expected
    assert {row.id for row in (await operating.rows()).values() if row.updated_date == NOW} == expected


async def test_the_place_is_written_with_the_piece_and_the_next_process_goes_on_there(
    operating: Operating, look: Look
) -> None:
    rows = [Row(state="DEAD", updated_date=at(number)) for number in range(10)]
    await insert(look, rows)
    await operating.begin()

    first = await operating.piece("retry", DEAD, None, 4)

    place = operating_place(await operating.operation())
    assert first.next == place
    assert {row.id for row in (await operating.rows()).values() if row.state == "PENDING"} == {
        row.id for row in rows[6:]
    }  # fmt: skip
    await look.fetch("UPDATE {operations} SET worker = 'another'")
    rest = await operating.piece("retry", DEAD, place, 1000, worker="another")
    assert (rest.matched, rest.done, rest.next) == (6, 6, None)
    again = await operating.piece("retry", DEAD, operating_place(await operating.operation()), 1000, worker="another")
    assert (again.matched, again.done, again.next) == (0, 0, None), "the place behind the last row"
    assert operating_place(await operating.operation()) == END


def operating_place(operation: dict[str, Any]) -> Place:
    return msgspec.json.decode(operation["reached"], type=Place)


async def test_a_piece_that_is_carried_out_twice_changes_no_row_twice(operating: Operating, look: Look) -> None:
    await insert(look, [Row(state="DEAD", updated_date=at(number)) for number in range(10)])
    await operating.begin()

    first = await operating.piece("retry", DEAD, None, 4)
    await look.fetch("UPDATE {event_notifications} SET state = 'DEAD' WHERE state = 'PENDING'")
    again = await operating.piece("retry", DEAD, None, 4)

    assert (first.done, again.done) == (4, 4)
    pending = [row for row in (await operating.rows()).values() if row.state == "PENDING"]
    assert {row.created_date for row in pending} == {at(0)}
    assert len(pending) == 4, "the rows of the second piece are others"


@pytest.mark.parametrize(
    "values",
    [{"state": "DONE"}, {"state": "STOPPED"}, {"stop_ordered": True}, {"worker": "another"}, {"namespace": "another"},
     {"id": uuid4()}],
    ids=lambda values: next(iter(values)),
)  # fmt: skip
async def test_nothing_is_changed_for_an_operation_that_is_not_ours_any_longer(
    operating: Operating, look: Look, values: dict[str, Any]
) -> None:
    await insert(look, [Row(state="DEAD")])
    await operating.begin(**values)
    before = await operating.operation()

    for kind in ("retry", "skip"):
        piece = await operating.piece(kind, DEAD)
        assert (piece.matched, piece.done, piece.refused, piece.is_ours) == (0, 0, 0, False)

    assert [row.state for row in (await operating.rows()).values()] == ["DEAD"]
    assert await operating.operation() == before


async def test_a_row_that_has_changed_since_it_was_found_is_left(operating: Operating, look: Look) -> None:
    rows = [Row(state="DEAD", updated_date=at(number)) for number in range(3)]
    await insert(look, rows)
    await operating.begin()
    await look.fetch(f"UPDATE {{event_notifications}} SET state = 'SUCCEEDED' WHERE id = '{rows[0].id}'")
    await look.fetch(f"UPDATE {{event_notifications}} SET updated_date = '{at(600)}' WHERE id = '{rows[1].id}'")

    found = [str(row.id) for row in rows]
    changed = await operating.database.search.change(
        Change("app", BulkOrder("retry", OPERATION, "me", DEAD), found, Place("dead", "ledger", ("1", "2", "0")), NOW)
    )

    assert changed == (1, 1)
    states = {row.id: row.state for row in (await operating.rows()).values()}
    assert states == {rows[0].id: "SUCCEEDED", rows[1].id: "DEAD", rows[2].id: "PENDING"}


async def test_rows_and_record_are_written_together_or_not_at_all(operating: Operating, look: Look) -> None:
    await insert(look, [Row(state="DEAD")])
    await operating.begin()
    await look.fetch("ALTER TABLE {operations} RENAME COLUMN reached TO elsewhere")

    with pytest.raises(Exception, match="reached"):
        await operating.piece("retry", DEAD)

    assert [row.state for row in (await operating.rows()).values()] == ["DEAD"]


async def test_a_clock_that_is_slow_does_not_make_a_changed_row_match_again(operating: Operating, look: Look) -> None:
    await insert(look, [Row(state="DEAD")])
    await operating.begin()
    late = Search(until=at(2000))

    assert (await operating.piece("retry", late)).done == 1
    assert (await operating.piece("retry", late)).matched == 0
    [row] = (await operating.rows()).values()
    assert row.updated_date == at(2000)
    assert (await operating.operation())["updated_date"] in (NOW, f"{NOW}.000000")
