"""Helpers for tests: an outbox in memory, a movable clock, emitted events.

The fixtures of the pytest plugin (``outboxio_pytest``) are built on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outboxio.testing.actions import Performed, Statement, perform
from outboxio.testing.emitted import EmittedEvent, EmittedEvents, EventsOf, watch_events
from outboxio.testing.jobs import run_job
from outboxio.testing.memory import Drain, MovableClock, drain, emitted, expect_event, memory_outbox

if TYPE_CHECKING:
    from outboxio.testing.simulation import Process, SimulationFailed, World, simulate

__all__ = [
    "Drain",
    "EmittedEvent",
    "EmittedEvents",
    "EventsOf",
    "MovableClock",
    "Performed",
    "Process",
    "SimulationFailed",
    "Statement",
    "World",
    "drain",
    "emitted",
    "expect_event",
    "memory_outbox",
    "perform",
    "run_job",
    "simulate",
    "watch_events",
]


def __getattr__(name: str) -> Any:
    """Import the simulation on first use, because most tests do not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outboxio.testing import simulation

    return getattr(simulation, name)
