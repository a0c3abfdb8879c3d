"""The history and the tables of a chaos run, as the checker reads them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from outboxio.model.event import type_name
from tests.chaos.handlers import Kind
from tests.chaos.history import Line

NEVER = 2**63
TERMINAL = frozenset({"SUCCEEDED", "EXPIRED", "DEAD", "SKIPPED"})


class Stored(Struct):
    """A row of ``events``."""

    id: str
    action: str
    type: str
    cause: str = ""
    delivered: bool = True


class Owed(Struct):
    """A row of ``event_notifications``."""

    id: str
    event: str
    handler: str
    state: str = "SUCCEEDED"
    has_reason: bool = False


class Final(Struct):
    """The rows of the database at the end, and other leftovers."""

    events: list[Stored] = []
    notifications: list[Owed] = []
    effects: list[tuple[str, str]] = []
    """Handler and event of each effect that a transactional handler has left in the database."""
    actions: list[str] = []
    """The actions whose own row is there."""
    left: list[str] = []
    """Sessions, locks and processes that should be gone."""


class Violation(NamedTuple):
    invariant: int
    what: str


class Run(Struct):
    """A call of a handler for an event."""

    line: Line
    end: int
    how: str

    @property
    def slot(self) -> str:
        """The slot under whose lease the run started."""
        return self.line.slot or slot_name(self.line.handler, self.line.partition)

    def is_same_call(self, other: Run) -> bool:
        """True for two events of one call of a batch handler."""
        return self.line.call > 0 and (self.line.process, self.line.call) == (other.line.process, other.line.call)

    def __str__(self) -> str:
        line = self.line
        return f"run {line.run} of {line.process} ({self.slot} for {line.event}, term {line.term}, {self.how})"


def slot_name(handler: str, partition: int) -> str:
    """A slot as named in the history: ``score``, or ``score/3``."""
    return f"{handler}/{partition}" if partition else handler


def hook_of(handler: str) -> str:
    """The name under which the hook of a handler writes its effects."""
    return f"on_dead of {handler}"


def lock_of(slot: str) -> str:
    """The cluster lock of a slot."""
    return f"app/dispatch/{slot}"


class Case(Struct, dict=True):
    """The history and tables to check."""

    history: Sequence[Line]
    final: Final
    handlers: Mapping[str, Kind]

    def lines(self, *what: str) -> list[Line]:
        return [line for line in self.history if line.what in what]

    @cached_property
    def ends(self) -> dict[str, int]:
        """When each process ended."""
        return {line.how: line.at for line in self.lines("exit")}

    @cached_property
    def runs(self) -> list[Run]:
        finishes = {(line.process, line.run): line for line in self.lines("finish")}
        for_ever = max((line.at for line in self.history), default=0) + 1
        found: list[Run] = []
        for line in self.lines("start"):
            finish = finishes.get((line.process, line.run))
            end = self.ends.get(line.process, for_ever) if finish is None else finish.at
            found.append(Run(line, end, "cut short" if finish is None else finish.how))
        return found

    @cached_property
    def kinds(self) -> dict[str, list[str]]:
        """The handlers of each event type that all processes have."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, kind in self.handlers.items():
            if kind.is_everywhere:
                found[type_name(kind.event)].append(name)
        return found

    @cached_property
    def owed(self) -> dict[tuple[str, str], Owed]:
        return {(owed.event, owed.handler): owed for owed in self.final.notifications}

    @cached_property
    def newest(self) -> dict[str, list[Line]]:
        """How each lock was taken, in chronological order."""
        found: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines("taken"):
            found[line.lock].append(line)
        return found

    @cached_property
    def proofs(self) -> dict[str, list[Line]]:
        """The proofs of each process's locks, in chronological order."""
        found: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines("proven"):
            found[line.process].append(line)
        return found

    @cached_property
    def reopened(self) -> dict[str, list[int]]:
        """For each notification the times at which an operator let it run again."""
        found: dict[str, list[int]] = defaultdict(list)
        for line in self.lines("reopened"):
            found[line.notification].append(line.at)
        return found

    @cached_property
    def first_ends(self) -> dict[str, int]:
        """For each notification the earliest possible time of its end."""
        ends: dict[str, int] = {}
        for line in self.lines("settling"):
            if line.state in TERMINAL and self.outcomes.get((line.process, line.run)) != 0:
                for notification, _, _ in line.rows:
                    ends.setdefault(notification, line.at)
        for line in self.lines("skipped"):
            ends[line.notification] = min(line.at, ends.get(line.notification, NEVER))
        return ends

    @cached_property
    def answers(self) -> dict[tuple[str, int], Line]:
        """The results of statements that write outcomes, where the result arrived."""
        return {(line.process, line.run): line for line in self.lines("settled")}

    @cached_property
    def outcomes(self) -> dict[tuple[str, int], int]:
        """The number of rows that each of these statements wrote."""
        return {statement: line.number for statement, line in self.answers.items()}

    def superseded(self, slot: str, term: int, at: int) -> bool:
        """True if a newer term of a slot's lock was given to a process before a given time."""
        return any(line.term > term and line.at < at for line in self.newest.get(lock_of(slot), ()))

    def proven_until(self, process: str, at: int, unknown: int) -> int:
        """The time until which the locks of a process were proven, as known to the process at a given time."""
        proofs = self.proofs.get(process, [])
        last = bisect_right(proofs, at, key=lambda line: line.at)
        return proofs[last - 1].until if last else unknown
