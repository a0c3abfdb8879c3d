"""Run a few lines of code in a separate process, with an outbox on the test's database."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

FIRST_POSITION = """
    import asyncio, json, os, sys, threading
    from collections import Counter
    from uuid import uuid4
    from outboxio import Outbox, Settings
    from tests.kit.app import Emit, WalletOpened
    from tests.kit.probes import add_wallet

    outbox = Outbox(sys.argv[1], namespace="app", settings=Settings(pool_timeout="10s", lock_heartbeat="300ms"))
"""


async def outcome(url: str, body: str) -> Any:
    """Run a program and return the JSON that it prints."""
    code = textwrap.dedent(FIRST_POSITION) + textwrap.dedent(body)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, url, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(90):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)
