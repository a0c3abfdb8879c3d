"""The number and the size of the INSERTs for the events of an action on MySQL and MariaDB."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import pytest

from outboxio.model.event import ActionRecord, EventRecord
from outboxio.storage.mysql.insertion import MAX_STATEMENT_SIZE, insertions

PACKET = 64 * 2**20  # the default of MySQL
MOMENT = datetime(2030, 1, 1)
ACTION = ActionRecord(
    namespace="app", action_id=UUID(int=1), action_name="A", action_params="{}", started_date=MOMENT,
    completion_date=MOMENT,
)  # fmt: skip


def statements(texts: list[str], packet: int = PACKET) -> list[bytes]:
    events = [EventRecord(id=UUID(int=number), payload=text) for number, text in enumerate(texts)]
    return list(insertions(ACTION, events, lambda text: f"'{text}'", packet))


def test_statements_of_a_large_action_have_a_bounded_size() -> None:
    number = 10_000
    (single,) = statements(["x"])
    written = statements(["x"] * number)
    assert sum(statement.count(b"'x'") for statement in written) == number
    assert max(map(len, written)) <= MAX_STATEMENT_SIZE
    assert sum(map(len, written)) <= number * len(single), "each byte is sent once"
    assert len(written) <= number * len(single) // MAX_STATEMENT_SIZE + 1


@pytest.mark.parametrize(
    ("sizes", "packet", "expected"),
    [
        ([1, 1, 1], PACKET, 1),
        ([2 * MAX_STATEMENT_SIZE], PACKET, 1),
        ([1, 2 * MAX_STATEMENT_SIZE, 1, 1], PACKET, 3),
        ([MAX_STATEMENT_SIZE // 2] * 4, PACKET, 4),
        ([4000] * 4, 10_000, 2),
    ],
    ids=["small", "one-large", "large-among-small", "halves", "small-packet"],
)
def test_a_large_row_has_its_own_statement(sizes: list[int], packet: int, expected: int) -> None:
    written = statements(["x" * size for size in sizes], packet)
    assert len(written) == expected
    assert sum(statement.count(b"'x") for statement in written) == len(sizes)
