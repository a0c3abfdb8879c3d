"""Input from outside cannot add log lines."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from outboxio import Event, EventEnvelope, InvalidEvent, Received
from outboxio.testing import memory_outbox

FORGED = "billing\r\n2026-11-24 ERROR outboxio  all is lost\x1b[2J\u2028"


class Paid(Event):
    cents: int


async def pay(envelope: EventEnvelope[Any]) -> None:
    raise ValueError("no money")


async def test_a_line_break_in_an_external_name_adds_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "outboxio")
    async with memory_outbox() as outbox:
        outbox.handler(Paid, name="pay")(pay)
        for way in (outbox.inbox.receive, outbox.inbox.consume):
            for cents in (1, 2):
                answer: Any = await way(  # type: ignore[operator]  # both take these
                    source=FORGED, external_id=FORGED, type="Paid", payload={"cents": cents},
                    **({"on_error": "store"} if way == outbox.inbox.consume else {}),
                )  # fmt: skip
            assert getattr(answer, "status", answer) is Received.CONFLICT
        await outbox.drain()

    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if "different payload" in text]) == 2
    assert [text for text in messages if not text.isprintable()] == []


async def test_a_line_break_in_a_user_error_adds_no_log_line() -> None:
    async with memory_outbox() as outbox:
        outbox.handler(Paid, name="pay")(pay)
        with pytest.raises(InvalidEvent) as refused:
            await outbox.inbox.receive(source=FORGED, external_id=FORGED, type="Paid", payload="no JSON")
        with pytest.raises(ExceptionGroup) as failed:
            await outbox.inbox.consume(source=FORGED, external_id=FORGED, type="Paid", payload={"cents": 1})

    for error in (refused.value, failed.value):
        assert str(error).isprintable()
