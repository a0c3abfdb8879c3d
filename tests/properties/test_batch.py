"""Batches: whichever rows are bad, each row has one outcome, and only the bad rows fail."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from datetime import datetime
from typing import Any, cast
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboxio import Batch, Event, Settings, State
from outboxio.handlers.handler import HandlerRegistry, make_handler
from outboxio.model.emitter import Emitter
from outboxio.model.envelope import EventEnvelope, HandlerContext
from outboxio.model.event import EventTypes
from outboxio.model.notification import Context, Notification
from outboxio.model.outcome import Lease, Outcome
from outboxio.runs.handler_queue import HandlerQueue, HandlerSpec
from outboxio.runs.invoker import HandlerInvoker
from outboxio.runs.ports import HandlingSetup
from outboxio.runs.run import BatchRun, Run
from outboxio.statistics.figures import Counters
from outboxio.support.clock import ShardClock, as_micros

NOW = datetime(2030, 1, 1, 12)
CONTEXT: Any = Context(
    event_id=UUID(int=2), action_id=UUID(int=3), action_name="Open", action_params=cast(Any, b"{}"), started_date=NOW,
    completion_date=NOW, model_id=None, model_type=None, event_date=NOW, correlation_id=None, causation_id=None,
    headers=cast(Any, b"null"), hops=0, ordering_key=None, created_date=NOW,
)  # fmt: skip


class Opened(Event):
    number: int


class NoDatabase:
    """An at-least-once batch needs none."""

    handler_transactions = 1


async def nothing(*anything: Any, **more: Any) -> Any: ...


class Called:
    """The outcomes of a call of a batch handler, and of the calls it was split into."""

    def __init__(self, size: int, raises: set[int], returns: set[int], undecodable: set[int]) -> None:
        self.calls: list[list[int]] = []
        self.ended: list[tuple[int, Outcome | None]] = []
        self._raises, self._returns, self._undecodable = raises, returns, undecodable
        self._size = size

    async def __call__(self, envelopes: list[EventEnvelope[Opened]]) -> list[EventEnvelope[Opened]]:
        numbers = [envelope.event.number for envelope in envelopes]
        self.calls.append(numbers)
        if bad := self._raises.intersection(numbers):
            raise ValueError(f"cannot do {sorted(bad)}")
        return [envelope for envelope in envelopes if envelope.event.number in self._returns]

    async def run(self) -> None:
        types = EventTypes()
        handler = make_handler(
            self, name="h", event_types=[Opened], aliases=(), topic=None, where="here", batch=Batch(size=self._size)
        )
        registry = HandlerRegistry(types)
        registry.add(handler)
        queue = HandlerQueue(HandlerSpec.of(handler, Settings(), 1, None))
        shared = HandlerContext(
            namespace="app", shard="default", resources=None, stopping=asyncio.Event(), execute=nothing, join=nothing,
            emitter=Emitter(types, stores_nul=False, max_hops=32), outbox=None,
        )  # fmt: skip
        setup = HandlingSetup(cast(Any, NoDatabase()), registry, ShardClock(lambda: NOW), Settings(), shared)
        caller = HandlerInvoker(setup, Counters(), emitted=lambda: None)
        lease = Lease("app/dispatch/h", "h", 1)
        rows = [Run(self._row(number), queue, lease) for number in range(self._size)]
        batch = BatchRun.of(rows)
        queue.running[batch] = None

        def done(run: Run, outcome: Outcome | None) -> None:
            del batch.remaining[run]
            self.ended.append((run.notification.sequence, outcome))

        task = asyncio.current_task()
        assert task is not None
        await caller.call_batch(batch, task, done)

    def _row(self, number: int) -> Notification:
        payload = "{}" if number in self._undecodable else f'{{"number":{number}}}'
        return Notification(
            id=UUID(int=number + 1), handler_name="h", event_type="Opened", payload=payload, state="PENDING",
            attempts=0, next_retry_us=as_micros(NOW), retention_us=as_micros(NOW), sequence=number, partition_number=0,
            raw_context=CONTEXT,
        )  # fmt: skip


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
def test_each_batch_row_has_one_outcome_and_only_bad_rows_fail(size: int, data: st.DataObject) -> None:
    some = st.sets(st.integers(0, size - 1), max_size=5)
    raises, returns, undecodable = data.draw(some), data.draw(some), data.draw(some)
    called = Called(size, raises, returns, undecodable)
    logging.disable()
    try:
        asyncio.run(called.run())
    finally:
        logging.disable(logging.NOTSET)

    outcomes = dict(called.ended)
    assert Counter(number for number, _ in called.ended) == Counter(range(size))
    failed = {number for number, outcome in outcomes.items() if outcome is not None and outcome.state is State.FAILED}
    assert failed == raises | returns | undecodable
    for number, outcome in outcomes.items():
        assert outcome is not None
        assert outcome.attempts == 1  # a split uses one attempt, regardless of the number of calls
        if number in undecodable:
            assert not any(number in call for call in called.calls)
        elif number in raises:
            assert [number] in called.calls  # the row was alone in its last call
        else:
            # A row may be part of several failed calls, but of only one successful call.
            assert sum(number in call and not raises.intersection(call) for call in called.calls) == 1
    bad = len(raises - undecodable)
    assert len(called.calls) <= 1 + 2 * bad * math.ceil(math.log2(size) + 1)
