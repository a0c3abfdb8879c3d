"""The warehouse: receives the shop's events into its own database, and handles them in order."""

from __future__ import annotations

from outboxio import Event, EventEnvelope, Outbox


class OrderChanged(Event):
    """The shop's event, with only the fields that the warehouse needs."""

    customer: str
    number: int


async def open_warehouse(database: str) -> Outbox:
    """Open the warehouse, with its handler, and create its tables."""
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
    """Return the event numbers by customer, in the order in which the handler saw them."""
    async with outbox.connection() as connection:
        rows = await connection.fetch("SELECT customer, number FROM handled ORDER BY place")
    seen: dict[str, list[int]] = {}
    for row in rows:
        seen.setdefault(row["customer"], []).append(row["number"])
    return seen
