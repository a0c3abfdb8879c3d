"""Kill the process wherever the handler awaits, and find the second charge.

python -m examples.card
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from examples.card.payments import TABLE, CardService, OrderPlaced, careless, idempotent
from outboxio import Outbox
from outboxio.testing import SimulationFailed, World, simulate

SEEDS = range(200)


def paying(application: Callable[[str, CardService], Outbox]) -> Callable[[World], Awaitable[None]]:
    async def scenario(world: World) -> None:
        world.execute(TABLE)
        cards = CardService()  # outside the process, so it survives a kill
        process = await world.process(lambda database: application(database, cards))
        async with process.outbox.transaction("PlaceOrder") as tx:
            tx.emit(OrderPlaced(1, 30_00), model_id=1, model_type="Order")
        await world.settle()
        assert cards.charges == [30_00], f"the card was charged {len(cards.charges)} times"
        assert world.fetch("SELECT order_id FROM payments") == [(1,)]

    return scenario


def main() -> None:
    for application in (careless, idempotent):
        try:
            simulate(paying(application), seeds=SEEDS)
        except SimulationFailed as failed:
            print(f"The {application.__name__} handler fails: {failed}\n")
        else:
            print(f"The {application.__name__} handler passes with {len(SEEDS)} seeds.")


if __name__ == "__main__":
    main()
