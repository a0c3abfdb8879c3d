"""An application that ``gunicorn --preload`` imports in the master process: the outbox is made before the forks."""

from __future__ import annotations

import asyncio
import os

from fastapi import FastAPI

from outboxio import Outbox, Settings
from tests.kit.app import Emit, Journal, MoneyDeposited
from tests.kit.inside import owner_of

outbox = Outbox(os.environ["DATABASE"], namespace="app", settings=Settings(lock_heartbeat="300ms"))
outbox.handler(MoneyDeposited, name="first")(Journal())

if "OPEN" in os.environ:
    asyncio.run(outbox.check())  # in the master, and the connections stay open

app = FastAPI(lifespan=outbox.lifespan)


@app.get("/")
async def work() -> dict[str, object]:
    await outbox.execute(Emit((1,)))
    return {"process": os.getpid(), "owner": owner_of(outbox)}
