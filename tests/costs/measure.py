"""Count the cost of the scenarios on a database."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import CodeType

import asyncpg.connection

from tests.costs.calls import Calls
from tests.costs.scenarios import SCENARIOS, Scenario
from tests.costs.still import StillLoop
from tests.costs.traffic import Traffic, seen
from tests.kit.background_loop import migrate, run_in_background

#: What is counted on each dialect. On MariaDB the calls depend on how the driver reads from the socket, and the rows on
#: random numbers of the server.
COUNTED: Mapping[str, Sequence[str]] = {
    "sqlite": ("calls", "instructions", "statements", "rows_written"),
    "postgres": ("calls", "statements", "round_trips", "rows_read", "bytes_sent"),
    "mariadb": ("statements", "round_trips", "bytes_sent"),
}
#: The only version of Python on which instructions are counted: each version has its own.
INSTRUCTIONS_OF = (3, 11)
#: asyncpg numbers its prepared statements, and sends the number: with as many digits in each run.
FIRST_STATEMENT = 0x10000

Cost = Mapping[str, float]


def has_instructions() -> bool:
    return sys.implementation.name == "cpython" and sys.version_info[:2] == INSTRUCTIONS_OF


def measure(dialect: str, database: str) -> dict[str, Cost]:
    """Count what each scenario costs on an empty database."""
    chosen = [each for each in SCENARIOS if dialect in each.dialects]
    run_in_background(migrate(database))
    return {scenario.name: Measurement(scenario, dialect, database).cost() for scenario in chosen}


class Measurement:
    """A run of a scenario."""

    def __init__(self, scenario: Scenario, dialect: str, database: str) -> None:
        self._scenario, self._metrics = scenario, COUNTED[dialect]
        self._counts: list[tuple[int, Counter[str]]] = []
        self._functions: list[Counter[CodeType]] = []
        was_enabled = gc.isenabled()
        gc.disable()  # finalizers would be called at any time
        try:
            with seen() as traffic:
                self._run(database, traffic)
        finally:
            if was_enabled:
                gc.enable()

    def cost(self) -> Cost:
        """The cost of an event, an action or a second."""
        (few, less), (many, more) = self._counts
        return {
            metric: round((more[metric] - less[metric]) / (many - few), 4)
            for metric in self._metrics
            if metric != "instructions" or has_instructions()
        }

    def functions(self) -> list[tuple[float, CodeType]]:
        """The functions that are called for an event, an action or a second, the most frequent first."""
        (few, _), (many, _) = self._counts
        less, more = self._functions
        calls = [((more[code] - less[code]) / (many - few), code) for code in more]
        return sorted(calls, key=lambda found: (-found[0], found[1].co_filename, found[1].co_qualname))

    def _run(self, database: str, traffic: Traffic) -> None:
        asyncpg.connection._uid = FIRST_STATEMENT  # type: ignore[attr-defined]  # private to asyncpg
        calls = Calls(with_instructions="instructions" in self._metrics and has_instructions())
        counting_calls = calls if "calls" in self._metrics else nullcontext()  # which takes long

        @contextmanager
        def counting(units: int) -> Iterator[None]:
            before, functions = _counted(traffic, calls), calls.by_function.copy()
            with counting_calls:
                yield
            counts = _counted(traffic, calls)
            counts.subtract(before)
            self._counts.append((units, counts))
            self._functions.append(calls.by_function - functions)

        with asyncio.Runner(loop_factory=lambda: StillLoop(traffic, self._scenario.name)) as runner:
            runner.run(self._scenario.run(database, counting))


def _counted(traffic: Traffic, calls: Calls) -> Counter[str]:
    return Counter(
        calls=calls.number, instructions=calls.instructions, statements=traffic.statements,
        round_trips=traffic.round_trips, rows_read=traffic.rows_read, rows_written=traffic.rows_written,
        bytes_sent=traffic.bytes_sent,
    )  # fmt: skip
