"""The dead letters: ``python -m shop.dead_letters`` lists them, and with ``retry`` runs their handlers again."""

import asyncio
import sys

from shop.database import engine
from shop.outbox import outbox


async def main(retries: bool) -> None:
    async with outbox:
        dead = await outbox.admin.list(state="DEAD")
        for letter in dead:
            print(f"{letter.handler_name} of {letter.model_type} {letter.model_id}: {letter.errors[-1]['message']}")
        if retries:
            await outbox.admin.retry([letter.id for letter in dead])
            print(f"{len(dead)} will run again")
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main(retries="retry" in sys.argv[1:]))
