"""Ekbatan's own executor, fan-out and dispatch on the tables of outboxio.

``OUTBOXIO_TEST_EKBATAN`` is the path of a Python (3.13 or later) with the packages ekbatan and psycopg. Without it the
tests are not collected.
"""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE, Process
from collections import Counter
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import msgspec
import pytest

from outboxio import Event, EventEnvelope, Outbox
from tests.kit.app import Look, eventually

PYTHON = os.environ.get("OUTBOXIO_TEST_EKBATAN")
PROGRAM = Path(__file__).parents[1] / "kit" / "ekbatan_program.txt"
BALANCE = Decimal("1000000000125.7234")
MANY = 1_000
WALLETS = """
CREATE TABLE ekbatan_wallets (id UUID PRIMARY KEY, version BIGINT, state VARCHAR(24), balance NUMERIC(30, 4),
  created_date TIMESTAMP, updated_date TIMESTAMP)
"""


class WalletOpened(Event, json_style="ekbatan"):
    balance: Decimal


class OpenWallet(msgspec.Struct, rename="camel"):
    balance: Decimal


async def ekbatan(url: str, *arguments: str) -> Process:
    assert PYTHON is not None
    url = url.replace("postgresql://", "postgresql+psycopg://")
    return await asyncio.create_subprocess_exec(PYTHON, str(PROGRAM), url, *arguments, stdin=PIPE, stdout=PIPE)


async def output_of(process: Process) -> str:
    output, _ = await process.communicate(b"\n")
    assert process.returncode == 0
    return output.decode().strip()


if PYTHON is not None:

    @pytest.mark.timeout(300)
    async def test_ekbatans_events_are_handled_once_while_both_fan_outs_run(postgres_url: str) -> None:
        seen, exact = Counter[UUID](), list[bool]()
        async with Outbox(postgres_url, namespace="app") as outbox:
            await outbox.migrate()
            await Look(postgres_url).fetch(WALLETS)

            @outbox.handler(WalletOpened, name="wallets")
            async def wallets(envelope: EventEnvelope[WalletOpened]) -> None:
                seen[envelope.event_id] += 1
                exact.append(envelope.event.balance == BALANCE == envelope.params(OpenWallet).balance)

            async def all_are_seen() -> bool:
                return len(seen) == MANY

            async with outbox.running():
                fanout = await ekbatan(postgres_url, "fanout")
                writers = [await ekbatan(postgres_url, "write", str(MANY // 2)) for _ in range(2)]
                for writer in writers:
                    await output_of(writer)
                await eventually(all_are_seen)
                fanned_out = int(await output_of(fanout))
            assert (await outbox.drain()).succeeded == 0

        assert (len(seen), set(seen.values()), set(exact)) == (MANY, {1}, {True})
        assert fanned_out <= MANY

    async def test_handlers_of_ekbatan_read_what_outboxio_wrote(postgres_url: str) -> None:
        async with Outbox(postgres_url, namespace="app") as outbox:
            await outbox.migrate()
            async with outbox.transaction("OpenWallet") as tx:
                for number in range(10):
                    tx.emit(WalletOpened(BALANCE), model_id=number, model_type="Wallet")

        assert (await output_of(await ekbatan(postgres_url, "handle"))).split() == [str(BALANCE)] * 10
