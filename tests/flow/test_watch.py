"""``outboxio watch`` as processes: one of several posts, a killed one is replaced, and cron gets an exit code."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from outboxio import Outbox, RetryPolicy, Unprocessable
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.forked import Forked, fork
from tests.kit.webhooks import webhook

ROOT = Path(__file__).parents[2]
# A notice is posted and printed, then stored as sent; if the process ends in between, the notice is posted again.
SENT = """
SELECT 1
FROM eventlog.instance_reports, jsonb_array_elements(report::jsonb -> 'notices') AS notice
WHERE namespace = '' AND (notice ->> 'is_sent')::boolean
"""


async def watching(database: str, url: str, *more: str) -> Forked:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("OUTBOXIO_")}
    environ = {**inherited, "PYTHONPATH": str(ROOT), "OUTBOXIO_WEBHOOK": url}
    words = ("watch", "--database", database, "--namespace", "app", *more)
    return await fork("outboxio.cli", *words, environ=environ, with_stderr=True)


async def refused(outbox: Outbox, *handlers: str) -> None:
    """A dead letter of each handler."""
    for name in handlers:
        hopeless = Journal(lambda envelope: Unprocessable("never"))
        outbox.handler(MoneyDeposited, name=name, retry=RetryPolicy(max_attempts=1))(hopeless)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()


async def has_sent(look: Look, number: int) -> bool:
    return len(await look.fetch(SENT)) == number


async def test_another_process_replaces_a_killed_one_and_repeats_nothing(postgres_url: str) -> None:
    with webhook() as receiver:
        async with Outbox(postgres_url, namespace="app") as outbox:
            await outbox.migrate()
            await refused(outbox, "mail")
            first = await watching(postgres_url, receiver.url, "--every", "1s")
            await eventually(lambda: len(receiver.texts) == 2)
            assert "no_instance" in receiver.texts[0] + receiver.texts[1]
            look = Look(postgres_url)
            await eventually(lambda: has_sent(look, 2))
            second = await watching(postgres_url, receiver.url, "--every", "1s")
            first.kill()
            await first.communicate()

            async with Outbox(postgres_url, namespace="app") as other:
                await refused(other, "sms")
            await eventually(lambda: len(receiver.texts) == 3)
            assert "`sms`" in receiver.texts[2]
            await eventually(lambda: has_sent(look, 3))

            second.send_signal(signal.SIGTERM)
            out, _ = await second.communicate()
            assert (second.returncode, out.decode().count("sms")) == (0, 1)
            assert len(receiver.texts) == 3


@pytest.mark.above_statements
async def test_cron_gets_the_exit_code_of_doctor(database_url: str) -> None:
    with webhook() as receiver:
        async with Outbox(database_url, namespace="app") as outbox:
            await outbox.migrate()
            well = await watching(database_url, receiver.url, "--once")
            out, _ = await well.communicate()
            assert (well.returncode, receiver.texts) == (0, [])
            assert "All is well" in out.decode()

            outbox.handler(WalletOpened, name="welcome")(Journal())
            await refused(outbox, "mail")
            bad = await watching(database_url, receiver.url, "--once")
            await bad.communicate()
            assert bad.returncode == 1
            assert any("`mail`" in text for text in receiver.texts)

            missing = await watching(database_url, "", "--once")
            _, err = await missing.communicate()
            assert missing.returncode == 2, err.decode()
