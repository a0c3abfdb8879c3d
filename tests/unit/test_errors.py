"""The messages of errors."""

from __future__ import annotations

import pytest

from outboxio import StaleRecord


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StaleRecord("Order", 1, 7), "Order 1 is no longer at version 7, or does not exist"),
        (StaleRecord("Order", 1, 0), "Order 1 is no longer at version 0, or does not exist"),
        (StaleRecord("Order", 1), "Order 1 has changed since it was read, or does not exist"),
        (StaleRecord("Order", version=7), "Order is no longer at version 7, or does not exist"),
        (StaleRecord("Order"), "Order has changed since it was read, or does not exist"),
    ],
)
def test_a_stale_record_error_states_only_what_is_known(error: StaleRecord, message: str) -> None:
    assert str(error) == message
