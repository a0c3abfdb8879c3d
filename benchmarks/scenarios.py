"""The scenarios: the question that each answers, its settings in several sizes, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

SIZES = ("full", "quick", "tiny")
SERVERS = ("postgres", "mysql", "mariadb")
EVERYWHERE = (*SERVERS, "sqlite")


class Metric(Struct, frozen=True):
    """A figure, with its label and format."""

    key: str
    label: str
    form: str = ",.0f"
    more_is_better: bool = True
    short: str = ""
    """The label where space is limited."""

    def shown(self, value: float | None) -> str:
        return "" if value is None else format(value, self.form)


class Setting(Struct, frozen=True):
    """The conditions of a run, the same for all contestants, with options for each size."""

    name: str
    sizes: Mapping[str, Mapping[str, Any]]
    peers: bool = False
    """True if the peers can run this."""
    bare: bool = True
    """True if the bare pipeline can run this."""
    beside: str = ""
    """The reference setting: outboxio does the same under better conditions."""
    dialects: Sequence[str] = EVERYWHERE

    def options(self, size: str) -> dict[str, Any]:
        return dict(self.sizes[size])


class Scenario(Struct, frozen=True):
    """A question, its settings, and the figures that answer it, the most important one first."""

    name: str
    title: str
    question: str
    metrics: Sequence[Metric]
    settings: Sequence[Setting]
    contestants: Sequence[str] = ("outboxio",)
    dialects: Sequence[str] = EVERYWHERE
    rounds: Mapping[str, int] = field(default_factory=lambda: {"full": 3, "quick": 1, "tiny": 1})

    @property
    def headline(self) -> Metric:
        return self.metrics[0]

    @property
    def is_compared(self) -> bool:
        """True if outboxio is not the only contestant."""
        return len(self.contestants) > 1 or any(setting.peers for setting in self.settings)


ONCE = {"full": 1, "quick": 1, "tiny": 1}
NOT_QUICK = {"full": 1, "quick": 0, "tiny": 1}


def _sized(full: Mapping[str, Any], quick: Mapping[str, Any], tiny: Mapping[str, Any], **common: Any) -> dict[str, Any]:
    return {"full": {**common, **full}, "quick": {**common, **quick}, "tiny": {**common, **tiny}}


def _events(**common: Any) -> dict[str, Any]:
    return _sized({"events": 40_000}, {"events": 20_000}, {"events": 300}, **common)


def _processes(
    name: str, events: Mapping[str, int], *, numbers: Sequence[int] = (1, 2, 4, 8), each: bool = False, **common: Any
) -> tuple[Setting, ...]:
    """Return the same setting for several numbers of processes. With ``each``, the number of events is per process."""
    return tuple(
        Setting(
            _on(name, number),
            _sized(
                *({"events": events[size] * (number if each else 1)} for size in SIZES),
                processes=number,
                partitions=16,
                **common,
            ),
            peers=not name,
            bare=False,
            beside="" if number == numbers[0] else _on(name, numbers[0]),
            dialects=SERVERS if number in (1, 8) and not name.startswith("computes") else ("postgres",),
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
        "Committed events are waiting. How fast does outboxio fan them out and handle them with empty "
        "handlers, until the last outcome is committed?",
        (EVENTS_PER_SECOND, *PER_EVENT),
        (
            Setting("1 type, 1 handler", _events(types=1, handlers=1), peers=True),
            Setting("20 types", _events(types=20, handlers=1), beside="1 type, 1 handler"),
            Setting("3 handlers", _events(types=1, handlers=3)),
        ),
        ("outboxio", "bare", "bare-plain"),
        rounds={"full": 3, "quick": 2, "tiny": 2},
    ),
    Scenario(
        "fanout",
        "Fan-out alone",
        "The first stage: it creates a row per event and handler.",
        (EVENTS_PER_SECOND, *PER_EVENT),
        (Setting("1 type, 1 handler", _events(types=1, handlers=1)),),
        ("outboxio", "bare"),
        rounds={"full": 2, "quick": 1, "tiny": 1},
    ),
    Scenario(
        "execute",
        "Executing actions",
        "Actions that change a row and emit an event, by 32 concurrent callers.",
        (Metric("rate", "actions/s"), P50, P99, *PER_EVENT),
        (
            Setting(
                "32 callers",
                _sized({"actions": 10_000}, {"actions": 3_000}, {"actions": 100}, callers=32),
            ),
        ),
        ("outboxio", "by-hand", "one-visit"),
        rounds={"full": 3, "quick": 2, "tiny": 2},
    ),
    Scenario(
        "sustained",
        "Under steady load",
        "Producers in another process commit events at half of the drain rate, while handlers run here. "
        "Does the backlog stay constant, and how long does an event wait from its commit to its handler? The load "
        "starts without a ramp, so the events of the first two seconds are left out of the figures, except in the "
        "column `p99 ms from the start`. The producers run on the same machine; the share of busy time shows whether "
        "events wait for a processor. The bare pipeline, which cannot write, gets the same share of "
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
                    {"seconds": 10, "warm_up": 20_000},
                    {"seconds": 5, "warm_up": 5_000},
                    {"seconds": 1, "warm_up": 200, "share": 0.2, "events_per_commit": 5},
                    share=0.5,
                    events_per_commit=25,
                ),
                bare=False,
            ),
            Setting(
                "the same, written by plain SQL",
                _sized(
                    {"seconds": 10, "warm_up": 20_000},
                    {"seconds": 5, "warm_up": 5_000},
                    {"seconds": 1, "warm_up": 200, "share": 0.2, "events_per_commit": 5},
                    share=0.5,
                    events_per_commit=100,
                    plain=True,
                ),
            ),
        ),
        ("outboxio", "bare"),
    ),
    Scenario(
        "latency",
        "Latency of an idle system",
        "One event at a time. How long does it take from the commit to the handler, with the producer in the same "
        "process and in another one?",
        (P50, P99),
        (
            Setting(
                "same process",
                _sized({"events": 200}, {"events": 40}, {"events": 10}, pause=0.1, producer="here"),
            ),
            Setting(
                "different process",
                _sized({"events": 200}, {"events": 40}, {"events": 10}, pause=0.1, producer="elsewhere"),
            ),
        ),
        rounds={"full": 2, "quick": 1, "tiny": 1},
    ),
    Scenario(
        "scale",
        "One handler on several processes",
        "A handler with 16 partitions, and a backlog that is committed once all processes have their share. How much "
        "faster are several processes than one, and what does an event cost? Handlers that wait take 20 ms, 20 at once "
        "in each process; handlers that compute use 200 µs of CPU; the other handlers are empty, and start "
        "when all events are fanned out, because only one process fans out. The figures cover the time in which 10 % "
        "to 90 % of the events are done; `CPU µs` is the total of all processes. Once the machine is fully busy, more "
        "processes cannot be faster, but an event should not cost more.",
        (EVENTS_PER_SECOND, CPU, SERVER_CPU, BUSY),
        (
            *_processes("waits for 20 ms, ", {"full": 5_000, "quick": 4_000, "tiny": 100}, each=True, handler="waits"),
            *_processes("empty, ", {"full": 150_000, "quick": 60_000, "tiny": 400}, handler="nothing"),
            *_processes("computes for 200 µs, ", {"full": 30_000, "quick": 15_000, "tiny": 200}, handler="computes"),
        ),
        dialects=SERVERS,
        rounds=NOT_QUICK,
    ),
    Scenario(
        "scale-beside",
        "Several processes, compared with others",
        "Empty handlers on one process and on four, compared with projects that claim rows with FOR UPDATE SKIP "
        "LOCKED. outboxio needs two stages per event, including fan-out.",
        (EVENTS_PER_SECOND, CPU, SERVER_CPU, BUSY),
        _processes("", {"full": 100_000, "quick": 60_000, "tiny": 400}, numbers=(1, 4), handler="nothing"),
        dialects=("postgres",),
        rounds=NOT_QUICK,
    ),
    Scenario(
        "backlog",
        "A long backlog",
        "Undelivered events of 20 types in tables with as many finished rows. How much longer do the last events take "
        "than the first? What if an open transaction prevents the server from cleaning up?",
        (
            Metric("last_to_first", "last : first", ".2f", more_is_better=False), EVENTS_PER_SECOND,
            Metric("resident_mb", "resident MB", more_is_better=False), *PER_EVENT,
        ),
        (
            Setting(
                "beside finished rows",
                _sized(
                    {"events": 200_000, "finished": 200_000},
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
        rounds=ONCE,
    ),
)  # fmt: skip

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
