"""Stored events of older versions."""

from shop.events import OrderPlaced, add_quantity


def test_an_order_of_version_1_is_for_one_piece() -> None:
    stored = {"order_id": 7, "email": "ada@example.org", "sku": "mug"}

    assert OrderPlaced.model_validate(add_quantity(stored)).quantity == 1
