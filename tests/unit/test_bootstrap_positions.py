"""The position of a bootstrap round-trips the key that it was created from."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import msgspec
import pytest

from outboxio import ConfigurationError
from outboxio.model.operating.groups import PageCursor
from outboxio.operations.bootstrapping import as_cursor, key_at


@pytest.mark.parametrize(
    "value",
    [
        0, -(2**63), 2**64, "", "a\\'\"é\n", UUID(int=7), Decimal("1.10"), Decimal("-0.000000000000000000001"),
        datetime(2026, 1, 31, 12, 0, 0, 1), datetime(2026, 1, 31, tzinfo=UTC),
        datetime(2026, 1, 31, tzinfo=timezone(timedelta(hours=5, minutes=30))), date(2026, 1, 31), b"\x00\xff", 0.1,
    ],
)  # fmt: skip
def test_a_key_survives_a_json_round_trip(value: object) -> None:
    stored = msgspec.json.encode(as_cursor([value, value]))
    one, other = key_at(msgspec.json.decode(stored, type=PageCursor))
    assert type(one) is type(value)
    assert (one, other, str(one)) == (value, value, str(value))


@pytest.mark.parametrize("value", [None, True, [], object()])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="a key column holds int, str, uuid, decimal, datetime, date, bytes"):
        as_cursor([value])
