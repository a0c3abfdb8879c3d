"""Who owned which partition when, according to the history of a run; and the two invariants of balance."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tests.chaos.case import NEVER, Case, Run, lock_of
from tests.chaos.history import Line

SECOND = 1_000_000_000
OWNED_AGAIN_WITHIN = 2 * SECOND
TAKEN_BACK_WITHIN = SECOND * 9 // 10
"""A process that has its share does not acquire a released partition for 1 s."""
OFTEN, AGAIN_AND_AGAIN = 4, 3 * SECOND
PROOFS_COME_WITHIN = SECOND * 3 // 2
"""A working process proves its locks again within this time."""

#: The faults of the database and of the network, during which no process may be able to take a lock; and an older
#: version, beside which no process may. A blocked event loop, whose locks a thread proves without a line in the
#: history, counts from the time at which a handler blocks the loop.
DISTURBING = frozenset({"restart", "delay", "end-sessions", "cut", "black-hole", "exhaust", "cut-at-commit", "older"})

Span = tuple[int, int]


class Tenure(NamedTuple):
    """The time for which a process owned a partition."""

    begin: int
    end: int
    process: str


# --- 9 ---------------------------------------------------------------------------------------------


def owned_again(case: Case) -> Iterator[str]:
    """The waits of rows in partitions without an owner, although a process could own them."""
    tenures = {lock: list(_tenures(case, lock)) for lock in case.newest}
    able, disturbed = _merged(span for spans in _able(case).values() for span in spans), _disturbed(case)
    reported_ends = set[tuple[str, int]]()
    for run, since in _long_waits(case):
        wait = [(since, run.line.at)]
        owned = _merged((one.begin, one.end) for one in tenures.get(lock_of(run.slot), ()))
        unowned = _without(_common(_without(wait, owned), able), disturbed)
        for begin, end in unowned:
            if end - begin > OWNED_AGAIN_WITHIN and (run.slot, end) not in reported_ends:
                reported_ends.add((run.slot, end))
                yield f"{run.slot} was owned by nobody for {(end - begin) / SECOND:.1f} s, while {run} waited"


def _long_waits(case: Case) -> Iterator[tuple[Run, int]]:
    """The first runs that started long after their event was committed, and after the last partition change."""
    events = {line.action: line.events for line in case.lines("attempt")}
    committed = {event: line.at for line in case.lines("commit") for event in events.get(line.action, ())}
    ordered = [line.at for line in case.lines("fault") if line.how.startswith("repartition")]
    changes = sorted([*ordered, *(line.at for line in case.lines("spread"))])
    seen = set[str]()
    for run in sorted(case.runs, key=lambda run: run.line.at):
        if run.line.notification in seen:
            continue
        seen.add(run.line.notification)
        before = bisect_left(changes, run.line.at)
        since = max(committed.get(run.line.event, NEVER), changes[before - 1] if before else 0)
        if run.line.at - since > OWNED_AGAIN_WITHIN:
            yield run, since


def _tenures(case: Case, lock: str) -> Iterator[Tenure]:
    """A process owns a lock until the loss is reported, the process has ended, or its last proof has expired.

    The last proof is the last before another process takes the lock: a late proof, when no other process could take the
    lock, changes nothing.
    """
    lost = defaultdict[str, list[int]](list)
    for line in case.lines("lost"):
        if line.lock == lock:
            lost[line.process].append(line.at)
    takings = case.newest[lock]
    for place, line in enumerate(takings):
        later = lost[line.process][bisect_left(lost[line.process], line.at) :]
        next_taken = next((other.at for other in takings[place + 1 :] if other.process != line.process), NEVER)
        proofs = [p.until for p in case.proofs.get(line.process, ()) if p.at < next_taken]
        trusted_until = max([line.at, *proofs])
        ends = (later[0] if later else NEVER, case.ends.get(line.process, NEVER), trusted_until)
        yield Tenure(line.at, min(ends), line.process)


# --- 10 --------------------------------------------------------------------------------------------


def left_to_others(case: Case) -> Iterator[str]:
    """The partitions that a process took back repeatedly after it had given them to others.

    Once or twice is correct: in between the process may have learned that another process is gone.
    """
    given = defaultdict[str, list[Line]](list)
    for line in case.lines("released"):
        for lock in line.locks if line.how == "given" else ():
            given[lock].append(line)
    for lock, takings in case.newest.items():
        back = [line for line in takings if any(0 < line.at - g.at < TAKEN_BACK_WITHIN for g in _of(given[lock], line))]
        for first, last in zip(back, back[OFTEN - 1 :], strict=False):
            if first.process == last.process and last.at - first.at < AGAIN_AND_AGAIN:
                yield f"{last.process} released and reacquired {lock} {OFTEN} times within a few seconds"
                break


def _of(lines: Iterable[Line], other: Line) -> Iterator[Line]:
    return (line for line in lines if line.process == other.process)


# --- times -----------------------------------------------------------------------------------------


def _able(case: Case) -> dict[str, list[Span]]:
    """The times in which each process proved its locks and was not leaving."""
    begun = {line.process: line.at for line in case.lines("running")}
    leaving = {line.process: line.at for line in case.lines("leaving")}
    found: dict[str, list[Span]] = {}
    for process, proofs in case.proofs.items():
        spans = [
            (one.at, other.at)
            for one, other in pairwise(proofs)
            if one.until and other.at - one.at < PROOFS_COME_WITHIN
        ]
        its = [(begun.get(process, NEVER), leaving.get(process, NEVER))]
        found[process] = _common(_merged(spans), its)
    return found


def _disturbed(case: Case) -> list[Span]:
    """The times in which possibly no process can take a lock, and a while afterwards."""
    begun, found = dict[str, int](), list[Span]()
    for line in case.lines("fault"):
        name = line.how.split(" ", 1)[0]
        if name in DISTURBING and line.state == "begins":
            begun[name] = line.at
        elif name in begun:
            found.append((begun.pop(name), line.at + OWNED_AGAIN_WITHIN))
    blocked = [(line.at, line.until + OWNED_AGAIN_WITHIN) for line in case.lines("blocking")]
    return _merged([*found, *blocked, *((at, NEVER) for at in begun.values())])


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The same times in order, without overlaps."""
    found = list[Span]()
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The times that are in both."""
    both = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return [(begin, end) for begin, end in both if begin < end]


def _without(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The times that are in the first, and not in the second, which is in order."""
    left = list[Span]()
    for begin, end in some:
        for c, d in others:
            if d <= begin or c >= end:
                continue
            if begin < c:
                left.append((begin, c))
            begin = d
        if begin < end:
            left.append((begin, end))
    return left
