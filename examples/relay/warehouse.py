"""The warehouse: receives the events of the shop into a database of its own, and handles them in their order."""

from __future__ import annotations

from outboxio import Event, EventEnvelope, Outbox


class OrderChanged(Event):
    """The event of the shop, as far as the warehouse needs it."""

    customer: str
    number: int


async def open_warehouse(database: str) -> Outbox:
    """The warehouse with its tables and its handler."""
    outbox = Outbox(database, namespace="warehouse")

    @outbox.handler(OrderChanged, name="shelf", ordered=True, delivery="transactional")
    async def shelf(envelope: EventEnvelope[OrderChanged]) -> None:
        event = envelope.event
        await envelope.tx.execute(
            "INSERT INTO handled (customer, number) VALUES ($1, $2)", event.customer, event.number
        )

    await outbox.migrate()
    async with outbox.transaction("CreateTables") as tx:
        await tx.execute(
            "CREATE TABLE IF NOT EXISTS handled"
            " (place INTEGER PRIMARY KEY AUTOINCREMENT, customer TEXT NOT NULL, number INT NOT NULL)"
        )
    return outbox


async def handled(outbox: Outbox) -> dict[str, list[int]]:
    """By customer: the numbers of the events in the order in which the handler has seen these."""
    async with outbox.connection() as connection:
        rows = await connection.fetch("SELECT customer, number FROM handled ORDER BY place")
    seen: dict[str, list[int]] = {}
    for row in rows:
        seen.setdefault(row["customer"], []).append(row["number"])
    return seen
