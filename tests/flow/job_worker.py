"""A process with a job each second, for tests in which processes die.

``python -m tests.flow.job_worker '{...}'``: runs until SIGTERM, and reports ``running``, ``run`` with time and
attempt, and ``left``. ``hangs``: a run continues until the process ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from outboxio import Job, Outbox, RetryPolicy, Settings
from tests.flow.worker import report, stop_on_sigterm


async def main(config: dict[str, Any]) -> None:
    outbox = Outbox(config["database"], namespace="app", settings=Settings(lock_heartbeat="1s"))
    stop = stop_on_sigterm()

    @outbox.job("tick", every="1s", timeout="1m", retry=RetryPolicy(max_attempts=config["attempts"], base=0))
    async def tick(job: Job) -> None:
        report("run", scheduled=job.scheduled_at.isoformat(), attempt=job.attempt)
        if config["hangs"]:
            await asyncio.Event().wait()

    async with outbox:
        async with outbox.running():
            report("running")
            await stop.wait()
        report("left")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
