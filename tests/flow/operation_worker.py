"""A process that runs a bulk operation, and reports its progress: ``python -m tests.flow.operation_worker '{...}'``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from outboxio import Filter, Operation, Outbox
from outboxio.operations import notifications


def report(what: str, **details: Any) -> None:
    os.write(1, f"{json.dumps({'what': what, **details})}\n".encode())


def piece(operation: Operation) -> None:
    report("piece", id=str(operation.id), done=operation.done)


async def main(config: dict[str, Any]) -> None:
    notifications.CHUNK = config["chunk"]
    async with Outbox(config["database"], namespace="app") as outbox:
        operation = await outbox.admin.retry(
            Filter(states=("DEAD",)), progress=piece, actor="ada", reason="the mail server is back"
        )
        report("done", state=operation.state, done=operation.done)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
