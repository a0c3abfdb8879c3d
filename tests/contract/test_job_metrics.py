"""Statistics, metrics and spans of jobs."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Outbox, RetryPolicy, Transaction
from outboxio.integrations.prometheus import OutboxCollector, metrics_text
from outboxio.jobs import scheduler
from outboxio.telemetry.protocol import JobCall, Telemetry
from outboxio.testing import MovableClock, memory_outbox
from tests.kit.app import Journal, MoneyDeposited, eventually, hang
from tests.kit.jobs import metrics_include_jobs, ran
from tests.kit.probes import MakeOutbox
from tests.kit.traces import Traces, attributes, header_of, parent_of, trace_of

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

NOON = datetime(2030, 1, 1, 12)


async def test_runs_count_by_outcome_with_durations_and_missed_times(clock: MovableClock) -> None:
    ends = ["fail", "hang", "succeed"]
    async with memory_outbox(clock=clock) as outbox:

        @outbox.job("tick", every="1m", timeout="50ms")
        async def tick() -> None:
            end = ends.pop(0)
            if end == "fail":
                raise ValueError("no")
            if end == "hang":
                await hang()

        async with outbox.running():
            await ran(outbox)
            for number in (1, 2):
                await outbox.admin.run_job_now("tick")
                await ran(outbox, failed=number)
            clock.advance("10m")
            await ran(outbox, failed=2, succeeded=1)
        job = outbox.statistics["default"].jobs.of("tick")
    assert {outcome: job.runs(outcome) for outcome in job.durations} == {
        "succeeded": 1, "failed": 1, "timed_out": 1, "interrupted": 0,
    }  # fmt: skip
    assert (job.missed, job.stuck) == (9, 0)
    assert job.durations["timed_out"].seconds >= 0.05


async def test_a_run_that_ignores_cancellation_is_stuck_until_it_ends(
    clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "STUCK", 0.0)
    async with memory_outbox(clock=clock) as outbox:
        cancelled, free = asyncio.Event(), asyncio.Event()

        @outbox.job("tick", every="1m", timeout="50ms")
        async def tick() -> None:
            while not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:
                    cancelled.set()

        async with outbox.running():
            await ran(outbox)
            await outbox.admin.run_job_now("tick")
            await cancelled.wait()
            job = outbox.statistics["default"].jobs.of("tick")
            await eventually(lambda: job.stuck == 1)
            free.set()
            await ran(outbox, failed=1)
            await eventually(lambda: job.stuck == 0)


async def test_prometheus_reports_lateness_failure_and_pause_from_the_row(clock: MovableClock) -> None:
    async with memory_outbox(clock=clock) as outbox:

        @outbox.job("tick", every="1m")
        async def tick() -> None:
            raise ValueError("no")

        OutboxCollector(outbox)
        async with outbox.running():
            await ran(outbox)
            await outbox.admin.run_job_now("tick")
            await ran(outbox, failed=1)
            await outbox.admin.pause_job("tick")
            await metrics_include_jobs(outbox, lambda job: job.paused)
            text = metrics_text(outbox).decode()
    of_job = f'{{job="tick",namespace="{outbox.namespace}",shard="default"}}'
    lines = [line for line in text.splitlines() if 'job="tick"' in line]
    for expected in (
        f"outboxio_job_due_age_seconds{of_job} 0.0", f"outboxio_job_failing{of_job} 1.0",
        f"outboxio_job_paused{of_job} 1.0", f"outboxio_job_missed_total{of_job} 0.0",
    ):  # fmt: skip
        assert expected in lines


async def test_a_run_is_a_span_and_its_events_continue_the_trace(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    traces = Traces()
    outbox = await make_outbox(clock=clock, telemetry=traces.telemetry())
    outbox.handler(MoneyDeposited, name="receipt")(Journal())

    @outbox.job("tick", every="1m", retry=RetryPolicy(max_attempts=2, base="1s", jitter=0))
    async def tick(tx: Transaction) -> None:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)))
        if not traces.named("job tick"):
            raise ValueError("no mail server")

    with traces.tracer.start_as_current_span("main"):  # the spans of runs belong to no span of the application
        async with outbox.running():
            await ran(outbox)
            clock.advance("1m")
            await ran(outbox, failed=1)
            clock.advance("2s")
            await ran(outbox, failed=1, succeeded=1)
            await eventually(lambda: traces.named("process MoneyDeposited"))
    failed, succeeded = traces.named("job tick")
    assert (parent_of(failed), parent_of(succeeded)) == (None, None)
    common = {"outboxio.namespace": outbox.namespace, "outboxio.shard": "default", "outboxio.job": "tick"}
    scheduled = f"{datetime(2030, 1, 1, 12, 1).isoformat()}.000Z"
    assert attributes(failed) == {
        **common, "outboxio.scheduled_at": scheduled, "outboxio.attempt": 1, "outboxio.outcome": "failed",
        "error.type": "ValueError",
    }  # fmt: skip
    assert failed.status.description == "ValueError: no mail server"
    assert attributes(succeeded) == {
        **common, "outboxio.scheduled_at": scheduled, "outboxio.attempt": 2, "outboxio.outcome": "succeeded",
    }  # fmt: skip
    assert {trace_of(traces.one(name)) for name in ("send MoneyDeposited", "process MoneyDeposited")} == {
        trace_of(succeeded)
    }
    [row] = await outbox.admin.list()
    assert row.headers["traceparent"] == header_of(traces.one("send MoneyDeposited"))


class Broken(Telemetry):
    def job(self, *args: Any) -> JobCall:
        class Call(JobCall):
            def ended(self, *args: Any) -> None:
                raise RuntimeError("no collector")

        return Call()


async def test_failing_telemetry_is_logged_and_the_run_continues(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    outbox: Outbox = await make_outbox(clock=clock, telemetry=[Broken(), Telemetry()])

    @outbox.job("tick", every="1m")
    async def tick() -> None: ...

    with caplog.at_level(logging.ERROR):
        async with outbox.running():
            await ran(outbox)
            await outbox.admin.run_job_now("tick")
            await ran(outbox, succeeded=1)
    assert "telemetry of a job failed; the run continues: " in caplog.text
