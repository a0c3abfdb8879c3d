"""Three chained events, and the action that starts the chain."""

from __future__ import annotations

from outboxio import Action, Event, Transaction


class Placed(Event):
    order: int


class Paid(Event):
    order: int


class Shipped(Event):
    order: int


class PlaceOrder(Action):
    order: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Placed(self.order), model_id=self.order, model_type="Order")


class PayOrder(Action):
    order: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Paid(self.order), model_id=self.order, model_type="Order")
