"""The scenarios: each has settings in several sizes, and the figures that answer its question."""

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
    """The label where there is little room."""

    def shown(self, value: float | None) -> str:
        return "" if value is None else format(value, self.form)


class Setting(Struct, frozen=True):
    """Conditions under which the contestants of a scenario meet, with options for each size."""

    name: str
    sizes: Mapping[str, Mapping[str, Any]]
    peers: bool = False
    """True if the peers can do this, too."""
    bare: bool = True
    """True if the bare pipeline can do this."""
    beside: str = ""
    """The setting in which outboxio does the same under better conditions."""

    def options(self, size: str) -> dict[str, Any]:
        return dict(self.sizes[size])


class Scenario(Struct, frozen=True):
    """A question, its settings, and the figures that answer the question, the most important figure first."""

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

    @property
    def is_compared(self) -> bool:
        """True if outboxio is not the only contestant."""
        return len(self.contestants) > 1 or any(setting.peers for setting in self.settings)


def _sized(full: Mapping[str, Any], quick: Mapping[str, Any], tiny: Mapping[str, Any], **common: Any) -> dict[str, Any]:
    return {"full": {**common, **full}, "quick": {**common, **quick}, "tiny": {**common, **tiny}}


def _events(**common: Any) -> dict[str, Any]:
    return _sized({"events": 50_000}, {"events": 20_000}, {"events": 300}, **common)


def _only_full(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a quick run leaves out."""
    return {size: options for size, options in sizes.items() if size != "quick"}


def _processes(
    name: str,
    numbers: Sequence[int],
    events: Mapping[str, int],
    *,
    each: bool = False,
    peers: bool = False,
    **common: Any,
) -> tuple[Setting, ...]:
    """The same on so many processes. ``each``: the events are for each process, because more processes do more."""
    return tuple(
        Setting(
            _on(name, number),
            _sized(
                *({"events": events[size] * (number if each else 1)} for size in SIZES),
                processes=number,
                partitions=16,
                **common,
            ),
            peers=peers,
            bare=False,
            beside="" if number == numbers[0] else _on(name, numbers[0]),
        )
        for number in numbers
    )


def _on(name: str, number: int) -> str:
    return f"{name}{number} process{'es' * (number > 1)}"


EVENTS_PER_SECOND = Metric("rate", "events/s")
CPU = Metric("cpu_us", "CPU µs", ".1f", more_is_better=False)
STATEMENTS = Metric("statements", "statements", ".4f", more_is_better=False, short="stmts")
ROUND_TRIPS = Metric("round_trips", "round trips", ".4f", more_is_better=False, short="trips")
WAL_BYTES = Metric("wal_bytes", "WAL bytes", more_is_better=False, short="WAL B")
WAL_RECORDS = Metric("wal_records", "WAL records", ".1f", more_is_better=False, short="WAL rec")
PER_EVENT = (CPU, STATEMENTS, ROUND_TRIPS, WAL_BYTES, WAL_RECORDS)
SERVER_CPU = Metric("server_us", "server CPU µs", ".1f", more_is_better=False, short="server µs")
BUSY = Metric("busy", "machine busy", ".0%", more_is_better=False, short="busy")
P50 = Metric("p50_ms", "p50 ms", ".2f", more_is_better=False)
P99 = Metric("p99_ms", "p99 ms", ".2f", more_is_better=False)

SCENARIOS = (
    Scenario(
        "drain",
        "Draining a backlog",
        "Committed events are waiting. How fast does outboxio fan out and handle the events, with empty "
        "handlers, until the last outcome is committed?",
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
        "The first stage: a row per event and handler.",
        (EVENTS_PER_SECOND, *PER_EVENT),
        (Setting("1 type, 1 handler", _events(types=1, handlers=1)),),
        ("outboxio", "bare"),
    ),
    Scenario(
        "dispatch",
        "Dispatch alone",
        "The second stage: due rows are found, handlers are called, outcomes are committed.",
        (EVENTS_PER_SECOND, *PER_EVENT),
        (Setting("1 type, 1 handler", _events(types=1, handlers=1)),),
        ("outboxio", "bare"),
    ),
    Scenario(
        "execute",
        "Executing actions",
        "Actions that change a row and emit an event, by 32 concurrent callers.",
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
        "Producers in a different process commit events at half of the drain rate, while handlers run here. "
        "Does the backlog stay flat, and how long does an event wait from its commit to its handler? The load "
        "begins at once: the events of the first two seconds are left out of the figures, except in the "
        "column `p99 ms from the start`. The producers share the machine: the share of busy time shows if events "
        "wait for the load or for a processor. The bare pipeline, which cannot write, gets the same share of "
        "its own drain rate, written by plain SQL.",
        (
            P99, P50,
            Metric("p99_from_start_ms", "p99 ms from the start", ".0f", more_is_better=False, short="from start"),
            EVENTS_PER_SECOND, Metric("wanted_rate", "wanted events/s", short="wanted"),
            Metric("most_waiting", "most waiting", more_is_better=False),
            Metric("waiting_at_end", "waiting at the end", more_is_better=False, short="at the end"),
            BUSY, *PER_EVENT,
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
        "A single event at a time. How long from the commit to the handler, with the producer in the same "
        "process, and in a different process?",
        (P50, P99),
        (
            Setting(
                "same process",
                _sized({"events": 300}, {"events": 40}, {"events": 10}, pause=0.15, producer="here"),
            ),
            Setting(
                "different process",
                _sized({"events": 300}, {"events": 40}, {"events": 10}, pause=0.15, producer="elsewhere"),
            ),
        ),
    ),
    Scenario(
        "concurrency",
        "Many handlers that wait",
        "10,000 notifications, and a handler that sleeps for 100 ms, at a concurrency of 1,000: ideally a second.",
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
        "Fast notifications, alone, and beside as many notifications of a handler that sleeps for 10 s. When "
        "is the last fast notification handled?",
        (Metric("seconds", "seconds", ".2f", more_is_better=False), EVENTS_PER_SECOND, CPU, STATEMENTS),
        (
            Setting("alone", _sized({"fast": 20_000}, {"fast": 20_000}, {"fast": 200}, beside=False, sleep=10)),
            Setting(
                "beside a slow handler",
                _sized({"fast": 20_000}, {"fast": 20_000}, {"fast": 200}, beside=True, sleep=10),
                beside="alone",
            ),
        ),
    ),
    Scenario(
        "scale",
        "One handler on several processes",
        "A handler with 16 partitions, and a backlog that is committed when all processes have their share. How much "
        "faster are several processes than one, and what does an event cost? Handlers that wait take 20 ms, 20 at once "
        "in each process; handlers that compute take 200 µs of a processor; the other handlers are empty, and begin "
        "when all events are fanned out, because a single process fans out. The figures "
        "are of the time from a tenth of the events to nine tenths, and `CPU µs` is of all processes together. As soon "
        "as the machine is busy, more processes cannot be faster, but an event should cost no more.",
        (EVENTS_PER_SECOND, CPU, SERVER_CPU, BUSY),
        (
            *_processes("waits for 20 ms, ", (1, 2, 4, 8), {"full": 10_000, "quick": 4_000, "tiny": 100}, each=True,
                        handler="waits"),
            *_processes("empty, ", (1, 2, 4, 8), {"full": 300_000, "quick": 60_000, "tiny": 400}, handler="nothing"),
            *_processes("computes for 200 µs, ", (1, 2, 4, 8), {"full": 60_000, "quick": 15_000, "tiny": 200},
                        handler="computes"),
        ),
        dialects=("postgres", "mysql", "mariadb"),
    ),
    Scenario(
        "scale-beside",
        "Several processes, beside others",
        "Empty handlers on one process and on four, beside projects that claim rows with FOR UPDATE SKIP LOCKED. An "
        "event of outboxio takes two stages, fan-out included.",
        (EVENTS_PER_SECOND, CPU, SERVER_CPU, BUSY),
        _processes("", (1, 4), {"full": 200_000, "quick": 60_000, "tiny": 400}, peers=True, handler="nothing"),
        dialects=("postgres",),
    ),
    Scenario(
        "partitions",
        "Partitions in a single process",
        "What do 16 partitions cost a process that owns them all: draining a backlog, and with an idle system?",
        (EVENTS_PER_SECOND, P50, P99, *PER_EVENT),
        (
            Setting("draining, 1 partition", _events(types=1, handlers=1, partitions=1)),
            Setting("draining, 16 partitions", _events(types=1, handlers=1, partitions=16),
                    beside="draining, 1 partition"),
            *(
                Setting(
                    f"idle, {number} partition{'s' * (number > 1)}",
                    _sized({"events": 300}, {"events": 60}, {"events": 10}, pause=0.15, producer="here",
                           partitions=number),
                    beside="idle, 1 partition" if number > 1 else "",
                )
                for number in (1, 16)
            ),
        ),
        dialects=("postgres", "mysql", "mariadb"),
        rounds={"full": 6, "quick": 3, "tiny": 1},
    ),
    Scenario(
        "backlog",
        "A long backlog",
        "Undelivered events of 20 types beside as many finished rows. How much longer do the last events take "
        "than the first? And with a transaction held open, so that the server cannot clean up?",
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
                beside="without a snapshot",
            ),
            Setting(
                "without a snapshot",
                _sized({"events": 100_000}, {"events": 20_000}, {"events": 500}, types=20, finished=0, held=False),
            ),
        ),
    ),
    Scenario(
        "memory",
        "Memory",
        "How much memory does the process have at most while it drains a long backlog?",
        (Metric("resident_mb", "resident MB", more_is_better=False), EVENTS_PER_SECOND),
        (Setting("1 type", _sized({"events": 1_000_000}, {"events": 50_000}, {"events": 1000}, types=1)),),
        rounds={"full": 1, "quick": 1, "tiny": 1},
    ),
)  # fmt: skip

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
