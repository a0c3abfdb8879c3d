"""``outboxio tail --follow`` shows every change, however many notifications change between two polls."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from outboxio import Event, Outbox
from outboxio.cli.commands.notifications import Changes, tail
from outboxio.cli.filter_options import FilterOptions
from outboxio.model.operating.groups import Filter
from tests.kit.app import eventually

NUMBER = 1_000


class Sent(Event):
    number: int


async def filled(outbox: Outbox) -> None:
    """Many notifications that wait: the handler is paused."""
    await outbox.migrate()

    @outbox.handler(Sent, name="mail")
    async def mail(envelope: object) -> None: ...

    await outbox.drain()
    await outbox.admin.pause("mail")
    async with outbox.transaction("Send") as tx:
        for number in range(NUMBER):
            tx.emit(Sent(number))
    await outbox.drain()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_poll_reads_every_change_exactly_once(tmp_path: Path) -> None:
    async with Outbox(f"sqlite:///{tmp_path / 'tail.db'}", namespace="tail") as outbox:
        await filled(outbox)
        for filter in (Filter(), Filter(handler="mail"), Filter(states=("PENDING", "SKIPPED"))):
            changes = Changes(outbox, filter)
            first = await changes.first()
            assert len(first) == 200
            initial = {record.id for record in first} | {record.id for record in await changes.next()}
            assert initial <= {record.id for record in await outbox.admin.list(limit=NUMBER)}
            assert await changes.next() == []

            await outbox.admin.retry(Filter(states=("PENDING", "SKIPPED")))
            changed = await changes.next()
            assert len({record.id for record in changed}) == len(changed) == NUMBER
            assert [record.updated_date for record in changed] == sorted(record.updated_date for record in changed)
            assert await changes.next() == []

            await outbox.admin.skip(Filter(handler="mail"))
            assert [str(record.state) for record in await changes.next()] == ["SKIPPED"] * NUMBER
            assert await changes.next() == []


@pytest.mark.timeout(180)
async def test_following_prints_every_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with Outbox(f"sqlite:///{tmp_path / 'tail.db'}", namespace="tail") as outbox:
        await filled(outbox)
        lines: list[str] = []

        def read() -> set[str]:
            lines.extend(capsys.readouterr().out.splitlines())
            return {line["id"] for line in map(json.loads, lines) if line["state"] == "SKIPPED"}

        following = asyncio.create_task(tail(outbox, FilterOptions(), 0.1, follow=True, as_json=True))
        await eventually(lambda: read() == set() and lines)
        await outbox.admin.skip(Filter(handler="mail"))
        await eventually(lambda: len(read()) == NUMBER)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.mark.timeout(60)
async def test_following_ends_at_the_until_date(tmp_path: Path) -> None:
    async with Outbox(f"sqlite:///{tmp_path / 'tail.db'}", namespace="tail") as outbox:
        await outbox.migrate()
        assert await tail(outbox, FilterOptions(until="1h"), 0.1, follow=True, as_json=True) == 0
