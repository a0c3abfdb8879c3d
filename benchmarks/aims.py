"""The performance aims of outboxio, and whether a session met them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import Struct

from benchmarks.results import Results
from benchmarks.scenarios import EVERYWHERE, SERVERS, Metric

ONE, TYPES, HANDLERS = "1 type, 1 handler", "20 types", "3 handlers"

Find = Callable[[Results, str], float | None]
"""Return the figure on one database, or None if it was not measured there."""


class Aim(Struct, frozen=True):
    """A figure and its bound."""

    says: str
    find: Find
    bound: float
    is_least: bool = True
    dialects: tuple[str, ...] = EVERYWHERE

    @property
    def wanted(self) -> str:
        return f"{'at least' if self.is_least else 'at most'} {self.bound:g}"

    def holds(self, found: float) -> bool:
        return found >= self.bound if self.is_least else found <= self.bound


class AimResult(Struct, frozen=True):
    """An aim, and the value measured on one database."""

    aim: Aim
    database: str
    value: float

    @property
    def holds(self) -> bool:
        return self.aim.holds(self.value)

    @property
    def found(self) -> str:
        return f"{self.value:.3g}"


def checked(results: Results) -> list[AimResult]:
    """Return every aim on every database where it was measured, missed ones first.

    The size ``tiny`` has too few events to check an aim.
    """
    if results.size == "tiny":
        return []
    found = [
        AimResult(aim, database.id, value)
        for aim in AIMS
        for database in results.databases
        if database.dialect in aim.dialects and (value := aim.find(results, database.id)) is not None
    ]
    return sorted(found, key=lambda result: result.holds)


def missed(results: Results) -> list[AimResult]:
    """Return the aims that were measured and missed."""
    return [result for result in checked(results) if not result.holds]


def _beside(contestant: str, scenario: str, setting: str, results: Results, database: str) -> float | None:
    """Return outboxio's rate divided by a contestant's rate."""
    return results.lead(database, scenario, setting, contestant)


def _own(scenario: str, setting: str, key: str, results: Results, database: str) -> float | None:
    """Return a figure of outboxio."""
    return results.ours(database, scenario, setting, Metric(key, key))


def _compared(scenario: str, setting: str, key: str, results: Results, database: str) -> float | None:
    """Return a figure of outboxio divided by the same figure in the reference setting."""
    return results.beside(database, scenario, setting, Metric(key, key))


def _slowed_down(scenario: str, setting: str, results: Results, database: str) -> float | None:
    ratio = _compared(scenario, setting, "rate", results, database)
    return None if ratio is None else 1 / ratio


def _least(
    says: str, find: Callable[..., float | None], *where: str, bound: float, on: tuple[str, ...] = EVERYWHERE
) -> Aim:
    return Aim(says, partial(find, *where), bound, True, on)


def _most(
    says: str, find: Callable[..., float | None], *where: str, bound: float, on: tuple[str, ...] = EVERYWHERE
) -> Aim:
    return Aim(says, partial(find, *where), bound, False, on)


POSTGRES = ("postgres",)

AIMS = (
    *(
        _least(f"draining, {setting}: relative to the bare pipeline", _beside, "bare", "drain", setting, bound=0.75,
               on=SERVERS)
        for setting in (ONE, TYPES, HANDLERS)
    ),
    _least("draining: 20 types relative to 1 type", _compared, "drain", TYPES, "rate", bound=0.8),
    _least("draining: relative to txoutbox", _beside, "txoutbox", "drain", ONE, bound=1.4, on=POSTGRES),
    _least("draining: relative to graphile-worker", _beside, "graphile-worker", "drain", ONE, bound=1.6, on=POSTGRES),
    _least("draining: relative to graphile-worker as it comes", _beside, "graphile-worker-as-it-comes", "drain", ONE,
           bound=1.6, on=POSTGRES),
    _least("draining: relative to pgqueuer", _beside, "pgqueuer", "drain", ONE, bound=2.3, on=POSTGRES),
    _most("statements per event", _own, "drain", ONE, "statements", bound=0.02),
    _most("CPU µs of our process per event", _own, "drain", ONE, "cpu_us", bound=15, on=SERVERS),
    _least("executing: relative to a transaction by hand", _beside, "by-hand", "execute", "32 callers", bound=0.95),
    _most("a long backlog: time at the end relative to the start", _own, "backlog", "beside finished rows",
          "last_to_first", bound=1.2),
    _most("a snapshot held open: slowdown", _slowed_down, "backlog", "with an old snapshot", bound=2,
          on=SERVERS),
    _most("steady load: p99 in ms", _own, "sustained", "half of the drain rate", "p99_ms", bound=50),
    _most("steady load by plain SQL: p99 in ms", _own, "sustained", "the same, written by plain SQL", "p99_ms",
          bound=50),
    _most("idle, same process: p50 in ms", _own, "latency", "same process", "p50_ms", bound=2),
    _most("idle, same process: p99 in ms", _own, "latency", "same process", "p99_ms", bound=6),
    _most("idle, different process: p50 in ms", _own, "latency", "different process", "p50_ms", bound=3, on=POSTGRES),
    _most("idle, different process: p99 in ms", _own, "latency", "different process", "p99_ms", bound=8, on=POSTGRES),
    *(
        _least(f"handlers that wait, {number} processes: speedup over 1", _compared, "scale",
               f"waits for 20 ms, {number} processes", "rate", bound=bound)
        for number, bound in ((2, 1.9), (4, 3.7), (8, 7.2))
    ),
    *(
        _most(f"empty handlers, 8 processes: {says} per event, relative to 1 process", _compared, "scale",
              "empty, 8 processes", key, bound=1.25, on=SERVERS)
        for says, key in (("server CPU", "server_us"), ("our CPU", "cpu_us"))
    ),
    _most("a long backlog: resident MB", _own, "backlog", "beside finished rows", "resident_mb", bound=200),
)  # fmt: skip
