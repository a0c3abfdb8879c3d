"""Any text and document is read back unchanged from every database, and any error is stored."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from hypothesis import given, settings
from hypothesis import strategies as st

from outboxio import Event, EventEnvelope, Outbox, RetryPolicy
from outboxio.model.redaction import LONGEST_MESSAGE
from tests.kit.properties import SLOW, any_text, json_objects, names, text

#: Numbers that every database keeps in JSON as they are.
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-(10**9), 10**9).map(lambda number: number / 1024)
DOCUMENTS = json_objects(text, NUMBERS)
FEW = settings(max_examples=max(3, SLOW // 6))


class Said(Event):
    number: int
    document: dict[str, Any]


Fact = tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, str]


@FEW
@given(st.lists(st.tuples(DOCUMENTS, DOCUMENTS, DOCUMENTS, names, names), min_size=5, max_size=25))
async def test_documents_names_and_keys_are_read_back_unchanged(outbox: Outbox, facts: list[Fact]) -> None:
    seen: dict[int, EventEnvelope[Said]] = {}

    async def handle(envelope: EventEnvelope[Said]) -> None:
        seen[envelope.event.number] = envelope

    outbox.handler(Said, name=f"said-{uuid4()}", ordered=True)(handle)
    for number, (document, params, headers, key, correlation) in enumerate(facts):
        async with outbox.transaction(key, params, headers=headers, correlation_id=correlation) as tx:
            tx.emit(Said(number, document), model_id=correlation, model_type=key, ordering_key=key)

    await outbox.drain()

    assert len(seen) == len(facts)
    for number, (document, params, headers, key, correlation) in enumerate(facts):
        envelope = seen[number]
        assert envelope.event.document == document
        assert (envelope.action_params, envelope.headers) == (params, headers)
        assert (envelope.action_name, envelope.model_type, envelope.ordering_key) == (key, key, key)
        assert (envelope.model_id, envelope.correlation_id) == (correlation, correlation)


@FEW
@given(
    st.lists(any_text | st.builds(lambda some, n: some * n, any_text, st.integers(1, 1000)), min_size=5, max_size=40)
)
async def test_every_error_is_stored_in_one_statement_with_others(outbox: Outbox, messages: list[str]) -> None:
    async def handle(envelope: EventEnvelope[Said]) -> None:
        raise ValueError(messages[envelope.event.number])

    name = f"fails-{uuid4()}"
    outbox.handler(Said, name=name, retry=RetryPolicy(max_attempts=1))(handle)
    async with outbox.transaction("Say") as tx:
        for number in range(len(messages)):
            tx.emit(Said(number, {}), model_id=number)

    await outbox.drain()

    records = await outbox.admin.list(state="DEAD", handler=name)
    assert len(records) == len(messages)
    for record in records:
        assert record.model_id is not None
        said, stored = messages[int(record.model_id)], str(record.errors[0]["message"])
        clean = said.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "backslashreplace").decode()
        assert stored == clean if len(clean) <= LONGEST_MESSAGE else stored[:-1] == clean[: LONGEST_MESSAGE - 1]
