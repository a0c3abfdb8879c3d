"""A model of events and notifications in plain Python, to compare the databases with.

The model knows a process that drains from time to time, an operator, and a clock that is frozen in between. The
model has no queries, locks, batches or memory between two steps: every rule is written once, as the documentation
states the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

WAITING = ("PENDING", "FAILED")
PARKING = ("DEAD", "EXPIRED")
FINISHED = ("SUCCEEDED", "EXPIRED", "SKIPPED")
TERMINAL = (*FINISHED, "DEAD")

RETENTION = timedelta(hours=6)
TTL = timedelta(days=7)
KEEP_FINISHED = timedelta(hours=1)
FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=30), timedelta(minutes=5)
PATIENCE = timedelta(minutes=30)  # a handler that says "later" says so for this long after the event
LATER = timedelta(hours=1)
COUNTED = timedelta(minutes=10)


@dataclass(frozen=True)
class Role:
    """A handler of the application, independent of its current name."""

    name: str
    types: tuple[str, ...] = ()
    topic: str = ""
    ordered: bool = False
    max_attempts: int | None = None
    delivery: str = "at_least_once"
    batch: bool = False
    hook: bool = False
    retention: timedelta = RETENTION

    def stored_as(self, number: int) -> str:
        """A name of the handler."""
        return f"{self.name}-{number}" if number else self.name


ROLES = {
    role.name: role
    for role in (
        Role("mail", ("Opened",)),
        Role("audit", ("Opened", "Closed"), max_attempts=2, hook=True),
        # The key never expires by itself: the dispatcher decides when the retention of its BLOCKED rows starts.
        Role("ledger", ("Opened", "Closed"), ordered=True, retention=timedelta(days=36_500)),
        Role("stock", ("Closed",), delivery="transactional"),
        Role("once", ("Opened",), delivery="at_most_once"),
        Role("report", ("Closed",), batch=True),
        Role("feed", topic="news"),
    )
}


@dataclass(frozen=True)
class Fact:
    """An event."""

    number: int
    type: str
    key: str | None
    topic: str | None
    event_date: datetime
    available_at: datetime
    fate: str
    """The result of its handlers."""
    victims: frozenset[str]
    """The handlers that have this result; the others always succeed."""


@dataclass(frozen=True)
class Deployed:
    """The current name of a handler in the application, and its former names."""

    name: str
    aliases: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return self.aliases | {self.name}

    def renamed(self, name: str) -> Deployed:
        """The same handler under a new name, or under a former name again."""
        return Deployed(name, self.names - {name})


@dataclass
class Subscribed:
    role: Role
    aliases: frozenset[str]
    last_seen: datetime

    def wants(self, fact: Fact) -> bool:
        return fact.type in self.role.types or (self.role.topic != "" and self.role.topic == fact.topic)


@dataclass
class Owed:
    """A notification."""

    fact: Fact
    handler_name: str
    due: datetime
    retention_from: datetime
    updated: datetime
    key: str | None
    is_ordered: bool
    state: str = "PENDING"
    attempts: int = 0
    errors: int = 0

    def again(self, now: datetime) -> None:
        self.state, self.attempts, self.due, self.retention_from, self.updated = "PENDING", 0, now, now, now

    def end(self, state: str, now: datetime) -> None:
        self.state, self.updated = state, now


@dataclass
class Model:
    now: datetime
    deployed: dict[str, Deployed] = field(default_factory=dict)
    """The roles that this version of the application has."""
    subscriptions: dict[str, Subscribed] = field(default_factory=dict)
    pauses: dict[str, datetime | None] = field(default_factory=dict)
    undelivered: list[Fact] = field(default_factory=list)
    delivered: list[Fact] = field(default_factory=list)
    owed: dict[tuple[int, str], Owed] = field(default_factory=dict)
    runs: list[tuple[str, int]] = field(default_factory=list)
    """Which handlers were called for which events."""

    # --- draining ------------------------------------------------------------------------------

    def drain(self) -> None:
        self._announce()
        self._fan_out()
        for role, deployed in self.deployed.items():
            self._dispatch(ROLES[role], deployed.names)
        for row in self._unroutable():
            if row.retention_from < self.now - RETENTION:
                row.end("EXPIRED", self.now)

    def _announce(self) -> None:
        for role, deployed in self.deployed.items():
            self.subscriptions[deployed.name] = Subscribed(ROLES[role], deployed.aliases, self.now)

    def _live(self) -> dict[str, Subscribed]:
        return {name: s for name, s in self.subscriptions.items() if s.last_seen > self.now - TTL}

    def _fan_out(self) -> None:
        live = self._live()
        renamed = {alias for name, s in live.items() for alias in s.aliases if not self._has_come_back(alias, name)}
        for fact in list(self.undelivered):
            wanted = [name for name, s in live.items() if name not in renamed and s.wants(fact)]
            if wanted:
                self.undelivered.remove(fact)
                self.delivered.append(fact)
            for name in wanted:
                self._owe(fact, name, live[name].role)

    def _has_come_back(self, alias: str, name: str) -> bool:
        """True if each name is an alias of its partner, and the first name was seen last."""
        one, other = self._live().get(alias), self._live()[name]
        return one is not None and name in one.aliases and (one.last_seen, alias) > (other.last_seen, name)

    def _owe(self, fact: Fact, name: str, role: Role) -> bool:
        due = max(fact.available_at, self.now)
        key = fact.key if role.ordered else None
        return self.owed.setdefault(
            (fact.number, name), new := Owed(fact, name, due, due, self.now, key, role.ordered)
        ) is new  # fmt: skip

    def _dispatch(self, role: Role, names: frozenset[str]) -> None:
        ends = [ended for name, ended in self.pauses.items() if name in names]
        if None in ends:
            return
        renewed = max((end for end in ends if end is not None), default=datetime.min)
        mine = sorted((o for o in self.owed.values() if o.handler_name in names), key=lambda o: o.fact.number)
        for row in mine:
            if row.key is None and row.state in WAITING and row.due <= self.now:
                self._run(role, row, renewed)
        for key in {row.key for row in mine if row.key is not None}:
            for row in mine:
                if row.key != key or row.state in ("SUCCEEDED", "SKIPPED"):
                    continue
                if row.state in WAITING and row.due <= self.now:
                    self._run(role, row, renewed)
                if row.state != "SUCCEEDED":
                    break  # the row waits for its retry, or parks the key

    def _run(self, role: Role, row: Owed, renewed: datetime) -> None:
        began = max(row.retention_from, renewed)
        if self.now > began + role.retention:
            row.end("EXPIRED", self.now)
            return
        self.runs.append((role.name, row.fact.number))
        before, fate = row.attempts, fate_of(role.name, row.fact, row.attempts + 1, self.now)
        row.updated = self.now
        if fate == "fine":
            row.state, row.attempts = "SUCCEEDED", before + 1
            return
        row.errors = min(10, row.errors + 1)
        if role.delivery == "at_most_once":
            row.state, row.attempts = "DEAD", 1
            return
        if fate != "later":
            row.attempts += 1
        waits = {"later": LATER, "counted": COUNTED}
        wait = waits.get(fate) or min(FIRST_WAIT * 2 ** min(row.attempts - 1, 20), LONGEST_WAIT)
        used_up = role.max_attempts is not None and row.attempts >= role.max_attempts and row.attempts > before
        if fate == "hopeless" or used_up:
            row.state = "DEAD"
        elif self.now + wait > began + role.retention:
            row.state = "EXPIRED"
        else:
            row.state, row.due = "FAILED", self.now + wait

    # --- the operator --------------------------------------------------------------------------

    def retry(self, rows: Iterable[Owed]) -> int:
        return self._each(rows, lambda row: row.again(self.now))

    def skip(self, rows: Iterable[Owed]) -> int:
        chosen = [row for row in rows if row.state not in ("SUCCEEDED", "SKIPPED")]
        return self._each(chosen, lambda row: row.end("SKIPPED", self.now))

    def resume(self, name: str, key: str) -> int:
        names = self.names(name)
        parked = [o for o in self.owed.values() if o.handler_name in names and o.key == key and o.state in PARKING]
        return self._each(parked, lambda row: row.end("SKIPPED", self.now))

    def replay(self, name: str, since: datetime, states: Iterable[str]) -> int:
        names, wanted = self.names(name), set(states)
        done = [o for o in self.owed.values() if o.handler_name in names and o.state in wanted]
        return self._each([o for o in done if o.fact.event_date >= since], lambda row: row.again(self.now))

    def backfill(self, name: str, since: datetime) -> int:
        subscribed = self.subscriptions.get(name)
        if subscribed is None:
            return 0
        mine = [fact for fact in self.delivered if fact.event_date >= since and subscribed.wants(fact)]
        had = {number for number, handler in self.owed if handler in subscribed.aliases}
        return sum(self._owe(fact, name, subscribed.role) for fact in mine if fact.number not in had)

    def pause(self, name: str) -> None:
        self.pauses[name] = None

    def unpause(self, name: str) -> bool:
        was_paused = name in self.pauses and self.pauses[name] is None
        if was_paused:
            self.pauses[name] = self.now
        return was_paused

    def unsubscribe(self, name: str) -> int:
        gone = self.subscriptions.pop(name, None)
        return 0 if gone is None else len(gone.role.types) + (gone.role.topic != "")

    def purge(self) -> tuple[int, int]:
        before = self.now - KEEP_FINISHED
        old = [at for at, row in self.owed.items() if row.state in FINISHED and row.updated < before]
        for at in old:
            del self.owed[at]
        unfinished = {row.fact.number for row in self.owed.values() if row.state in WAITING}
        settled = [f for f in self.delivered if f.event_date < before and f.number not in unfinished]
        self.delivered = [fact for fact in self.delivered if fact not in settled]
        return len(old), len(settled)

    def _each(self, rows: Iterable[Owed], change: object) -> int:
        chosen = list(rows)
        for row in chosen:
            change(row)  # type: ignore[operator]
        return len(chosen)

    # --- queries -------------------------------------------------------------------------------

    def names(self, name: str) -> set[str]:
        """All names of the handler with this name, known to this version or the table."""
        subscribed = self.subscriptions.get(name)
        names = {name} | (set() if subscribed is None else set(subscribed.aliases))
        return names.union(*(deployed.names for deployed in self.deployed.values() if name in deployed.names))

    def knows(self, name: str, *, among_rows: bool = False) -> bool:
        """True if an operator may use the name; ``among_rows``: also if only finished rows have the name."""
        registered = {n for deployed in self.deployed.values() for n in deployed.names}
        subscribed = {n for one, s in self.subscriptions.items() for n in (one, *s.aliases)}
        owed = {row.handler_name for row in self.owed.values() if among_rows or row.state in WAITING}
        return name in registered | subscribed | owed | self.pauses.keys()

    def is_routable(self, name: str) -> bool:
        """True if a process has announced this handler within the last days."""
        live = self._live()
        return name in live or any(name in subscribed.aliases for subscribed in live.values())

    def _unroutable(self) -> Iterator[Owed]:
        return (o for o in self.owed.values() if o.state in WAITING and not self.is_routable(o.handler_name))

    def counts(self) -> dict[str, int]:
        """The counts as ``admin.counts`` reports them, with all waiting states in a single number."""
        states = [row.state for row in self.owed.values()]
        return {
            "waiting": sum(state in WAITING for state in states),
            **{state: states.count(state) for state in TERMINAL},
            "undelivered": len(self.undelivered),
            "unroutable": len(list(self._unroutable())),
        }

    def snapshot(self) -> Model:
        """The current rows."""
        return replace(self, owed={at: replace(row) for at, row in self.owed.items()})


def fate_of(role: str, fact: Fact, attempt: int, now: datetime) -> str:
    """The result of a run, shared by the handlers of the test and the model."""
    if role not in fact.victims:
        return "fine"
    if fact.fate == "fails twice":
        return "fails" if attempt <= 2 else "fine"
    if fact.fate == "later":
        return "later" if now < fact.event_date + PATIENCE else "fine"
    return fact.fate
