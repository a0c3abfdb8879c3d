"""A process of the course: ``python -m tests.kit.broker_service relay|inbox KIND BROKER_URL DATABASE_URL``."""

from __future__ import annotations

import asyncio
import sys

from outboxio import Outbox
from tests.kit.broker_kinds import KINDS

SENDER, RECEIVER = "sender", "receiver"


async def serve(side: str, kind: str, broker: str, database: str) -> None:
    """Run a side until the process is killed."""
    outbox = Outbox(database, namespace=SENDER if side == "relay" else RECEIVER)
    if side == "relay":
        outbox.add_handler(KINDS[kind].relay(broker, ordered=True))
        async with outbox.running():
            await asyncio.Event().wait()
    async with outbox, KINDS[kind].inbox(outbox, broker).running():
        await asyncio.Event().wait()


if __name__ == "__main__":
    _, side, kind, broker, database = sys.argv
    asyncio.run(serve(side, kind, broker, database))
