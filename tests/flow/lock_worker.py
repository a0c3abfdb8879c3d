"""A process that holds a keyed lock until the test ends: ``python -m tests.flow.lock_worker '{...}'``.

It reports ``held`` with the term, and ``lost`` when the lock is lost.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from outboxio import Outbox, Settings
from tests.flow.worker import report


async def main(config: dict[str, Any]) -> None:
    settings = Settings(lock_heartbeat="1s")
    async with Outbox(config["database"], namespace="app", settings=settings) as outbox, outbox.lock("k") as lock:
        report("held", term=await lock.term())
        await lock.lost.wait()
        report("lost")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
