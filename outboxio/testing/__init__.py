"""For the tests of applications: an outbox in memory, a clock that a test moves, and the events that were emitted.

The fixtures of the pytest plugin (``outboxio_pytest``) are made of these parts.
"""

from outboxio.testing.actions import Performed, Statement, perform
from outboxio.testing.emitted import EmittedEvent, EmittedEvents, EventsOf, watch_events
from outboxio.testing.jobs import run_job
from outboxio.testing.memory import Drain, MovableClock, drain, emitted, expect_event, memory_outbox

__all__ = [
    "Drain",
    "EmittedEvent",
    "EmittedEvents",
    "EventsOf",
    "MovableClock",
    "Performed",
    "Statement",
    "drain",
    "emitted",
    "expect_event",
    "memory_outbox",
    "perform",
    "run_job",
    "watch_events",
]
