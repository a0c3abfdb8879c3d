"""What is measured: each scenario, its settings in each size, and the figures that answer its question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

SIZES = ("full", "quick", "tiny")


class Metric(Struct, frozen=True):
    """A figure as people read it."""

    key: str
    label: str
    form: str = ",.0f"
    more_is_better: bool = True
    short: str = ""
    """Its label where there is little room."""

    def shown(self, value: float | None) -> str:
        return "" if value is None else format(value, self.form)


class Setting(Struct, frozen=True):
    """Conditions under which the contestants of a scenario meet, with the options of each size that has them."""

    name: str
    sizes: Mapping[str, Mapping[str, Any]]
    peers: bool = False
    """Whether the peers can do this, too."""
    bare: bool = True
    """Whether the bare pipeline can."""
    beside: str = ""
    """Another setting, in which outboxio does the same under better conditions."""

    def options(self, size: str) -> dict[str, Any]:
        return dict(self.sizes[size])


class Scenario(Struct, frozen=True):
    """A question, the settings in which it is asked, and the figures that answer it, the most important one first."""

    name: str
    title: str
    question: str
    metrics: Sequence[Metric]
    settings: Sequence[Setting]
    contestants: Sequence[str] = ("outboxio",)
    dialects: Sequence[str] = ("postgres", "mysql", "mariadb", "sqlite")
    rounds: Mapping[str, int] = field(default_factory=lambda: {"full": 3, "quick": 1, "tiny": 1})

    @property
    def headline(self) -> Metric:
        return self.metrics[0]


def _sized(full: Mapping[str, Any], quick: Mapping[str, Any], tiny: Mapping[str, Any], **common: Any) -> dict[str, Any]:
    return {"full": {**common, **full}, "quick": {**common, **quick}, "tiny": {**common, **tiny}}


def _events(**common: Any) -> dict[str, Any]:
    return _sized({"events": 50_000}, {"events": 20_000}, {"events": 300}, **common)


def _only_full(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What a quick look can do without."""
    return {size: options for size, options in sizes.items() if size != "quick"}


EVENTS_PER_SECOND = Metric("rate", "events/s")
CPU = Metric("cpu_us", "CPU µs", ".1f", more_is_better=False)
STATEMENTS = Metric("statements", "statements", ".4f", more_is_better=False, short="stmts")
ROUND_TRIPS = Metric("round_trips", "round trips", ".4f", more_is_better=False, short="trips")
WAL_BYTES = Metric("wal_bytes", "WAL bytes", more_is_better=False, short="WAL B")
WAL_RECORDS = Metric("wal_records", "WAL records", ".1f", more_is_better=False, short="WAL rec")
PER_EVENT = (CPU, STATEMENTS, ROUND_TRIPS, WAL_BYTES, WAL_RECORDS)
P50 = Metric("p50_ms", "p50 ms", ".2f", more_is_better=False)
P99 = Metric("p99_ms", "p99 ms", ".2f", more_is_better=False)

SCENARIOS = (
    Scenario(
        "drain",
        "Draining a backlog",
        "Committed events are waiting. How fast are they fanned out and handled, by handlers that do nothing, until "
        "the last outcome is committed?",
        (EVENTS_PER_SECOND, *PER_EVENT),
        (
            Setting("1 type, 1 handler", _events(types=1, handlers=1), peers=True),
            Setting("20 types", _events(types=20, handlers=1), beside="1 type, 1 handler"),
            Setting("200 types", _only_full(_events(types=200, handlers=1)), beside="1 type, 1 handler"),
            Setting("3 handlers", _events(types=1, handlers=3)),
        ),
        ("outboxio", "bare", "bare-plain"),
        rounds={"full": 3, "quick": 2, "tiny": 2},
    ),
    Scenario(
        "fanout",
        "Fan-out alone",
        "The first stage: one row for each event and handler.",
        (EVENTS_PER_SECOND, *PER_EVENT),
        (Setting("1 type, 1 handler", _events(types=1, handlers=1)),),
        ("outboxio", "bare"),
    ),
    Scenario(
        "dispatch",
        "Dispatch alone",
        "The second stage: rows that are due are found, their handlers called, the outcomes committed.",
        (EVENTS_PER_SECOND, *PER_EVENT),
        (Setting("1 type, 1 handler", _events(types=1, handlers=1)),),
        ("outboxio", "bare"),
    ),
    Scenario(
        "execute",
        "Executing actions",
        "Actions that change a row and emit one event, by 32 callers at once.",
        (Metric("rate", "actions/s"), P50, P99, *PER_EVENT),
        (
            Setting(
                "32 callers",
                _sized({"actions": 20_000}, {"actions": 3_000}, {"actions": 100}, callers=32),
            ),
        ),
        ("outboxio", "by-hand", "one-visit", "bare"),
        rounds={"full": 3, "quick": 2, "tiny": 2},
    ),
    Scenario(
        "sustained",
        "Under steady load",
        "Producers in another process commit half of what was just drained, while handlers run here. Does the backlog "
        "stay flat, and how long does an event wait from its commit to its handler? The load begins all at once: what "
        "was committed in its first two seconds is left out, and told of besides. The producers share the machine: how "
        "much of it is busy says whether it is the load that an event waits for, or a processor. The bare pipeline, "
        "which cannot write, gets the same share of what it drains itself, written by plain SQL.",
        (
            P99, P50,
            Metric("p99_from_start_ms", "p99 ms from the start", ".0f", more_is_better=False, short="from start"),
            EVENTS_PER_SECOND, Metric("wanted_rate", "wanted events/s", short="wanted"),
            Metric("most_waiting", "most waiting", more_is_better=False),
            Metric("waiting_at_end", "waiting at the end", more_is_better=False, short="at the end"),
            Metric("busy", "machine busy", ".0%", more_is_better=False, short="busy"), *PER_EVENT,
        ),
        (
            Setting(
                "half of the drain rate",
                _sized(
                    {"seconds": 30, "warm_up": 20_000},
                    {"seconds": 5, "warm_up": 5_000},
                    {"seconds": 1, "warm_up": 200, "share": 0.2},
                    share=0.5,
                    events_per_commit=25,
                ),
                bare=False,
            ),
            Setting(
                "the same, by larger commits",
                _only_full(
                    _sized(
                        {"seconds": 30, "warm_up": 20_000},
                        {},
                        {"seconds": 1, "warm_up": 200, "share": 0.2},
                        share=0.5,
                        events_per_commit=100,
                    )
                ),
                bare=False,
            ),
            Setting(
                "the same, written by plain SQL",
                _sized(
                    {"seconds": 30, "warm_up": 20_000},
                    {"seconds": 5, "warm_up": 5_000},
                    {"seconds": 1, "warm_up": 200, "share": 0.2},
                    share=0.5,
                    events_per_commit=100,
                    plain=True,
                ),
            ),
            Setting(
                "two fifths of the drain rate, written by plain SQL",
                _only_full(
                    _sized(
                        {"seconds": 30, "warm_up": 20_000},
                        {},
                        {"seconds": 1, "warm_up": 200, "share": 0.2},
                        share=0.4,
                        events_per_commit=100,
                        plain=True,
                    )
                ),
            ),
        ),
        ("outboxio", "bare"),
    ),
    Scenario(
        "latency",
        "Latency of an idle system",
        "One event at a time. How long from its commit to its handler, in the same process, and from another one?",
        (P50, P99),
        (
            Setting(
                "same process",
                _sized({"events": 300}, {"events": 40}, {"events": 10}, pause=0.15, producer="here"),
            ),
            Setting(
                "another process",
                _sized({"events": 300}, {"events": 40}, {"events": 10}, pause=0.15, producer="elsewhere"),
            ),
        ),
    ),
    Scenario(
        "concurrency",
        "Many handlers that wait",
        "10,000 notifications whose handler sleeps for 100 ms, at a concurrency of 1,000: a second, ideally.",
        (
            Metric("times_ideal", "x the ideal", ".2f", more_is_better=False),
            Metric("seconds", "seconds", ".2f", more_is_better=False), CPU, STATEMENTS,
        ),
        (
            Setting(
                "1,000 at once",
                _sized(
                    {"notifications": 10_000, "concurrency": 1000, "sleep": 0.1},
                    {"notifications": 10_000, "concurrency": 1000, "sleep": 0.1},
                    {"notifications": 100, "concurrency": 50, "sleep": 0.05},
                ),
            ),
        ),
    ),
    Scenario(
        "neighbour",
        "A slow neighbour",
        "Fast notifications, alone, and beside as many of a handler that sleeps for 10 s. When is the last fast one "
        "handled?",
        (Metric("seconds", "seconds", ".2f", more_is_better=False), EVENTS_PER_SECOND, CPU, STATEMENTS),
        (
            Setting("alone", _sized({"fast": 20_000}, {"fast": 20_000}, {"fast": 200}, beside=False, sleep=10)),
            Setting(
                "beside a slow one",
                _sized({"fast": 20_000}, {"fast": 20_000}, {"fast": 200}, beside=True, sleep=10),
                beside="alone",
            ),
        ),
    ),
    Scenario(
        "backlog",
        "A long backlog",
        "Undelivered events of 20 types beside as many finished rows. How much longer do the last of them take than "
        "the first? And with a transaction held open, so that nothing can be cleaned up?",
        (
            Metric("last_to_first", "last : first", ".2f", more_is_better=False), EVENTS_PER_SECOND,
            Metric("resident_mb", "resident MB", more_is_better=False), *PER_EVENT,
        ),
        (
            Setting(
                "beside finished rows",
                _sized(
                    {"events": 1_000_000, "finished": 1_000_000},
                    {"events": 50_000, "finished": 50_000},
                    {"events": 1000, "finished": 1000},
                    types=20,
                    held=False,
                ),
            ),
            Setting(
                "with an old snapshot",
                _sized({"events": 100_000}, {"events": 20_000}, {"events": 500}, types=20, finished=0, held=True),
                beside="without one",
            ),
            Setting(
                "without one",
                _sized({"events": 100_000}, {"events": 20_000}, {"events": 500}, types=20, finished=0, held=False),
            ),
        ),
    ),
    Scenario(
        "memory",
        "Memory",
        "How much memory does the process have at most while it drains a long backlog?",
        (Metric("resident_mb", "resident MB", more_is_better=False), EVENTS_PER_SECOND),
        (Setting("one type", _sized({"events": 1_000_000}, {"events": 50_000}, {"events": 1000}, types=1)),),
        rounds={"full": 1, "quick": 1, "tiny": 1},
    ),
)  # fmt: skip

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
