"""A simulated cluster of processes that share slots: many ``PartitionShare`` objects, a lock table and a lease table.

Time is simulated, so a minute of a cluster takes a fraction of a second. The views lag and differ between the
processes, the rounds are jittered, and the wake-up ``locks`` arrives after 1 to 5 ms or never. ``World.problems`` names
each broken rule. ``python -m tests.kit.partitions`` prints the table of figures: moves, and the longest times.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from itertools import count

from msgspec import Struct

from outboxio.model.lock_name import Slot
from outboxio.runtime.partition_share import SURPLUS_GRACE, PartitionShare, Plan
from outboxio.storage.protocols import Instance, PartitionCount, SeenLease

HEARTBEAT = 5.0
SILENCE = 1.8 * HEARTBEAT  # after which the server closes the session of a frozen process
ROUND = 0.2
VIEW_EVERY = 0.5  # the longest time between two views of a process that has its share
QUIET = 30.0  # the seconds without a move at the end of a run
START = datetime(2026, 1, 1)

#: The seconds in which real processes share slots evenly, for ``eventually``. A process that was blocked for a second,
#: while slots were free for the process, finds them taken, and gets them only after this time.
SHARED_WITHIN = SURPLUS_GRACE + 20


class Conditions(Struct, frozen=True):
    """What a run of the simulation allows to happen."""

    wakes: bool = True
    """True if the wake-up ``locks`` arrives between processes."""
    busy: float = 0.5
    """The share of held slots with rows in flight."""
    long_runs: float = 0.0
    """The share of busy slots with a run of seconds."""
    spreads_all: bool = False
    longest_unowned: float = 1.0
    """The bound for the seconds in which a slot has no owner."""
    longest_uneven: float = 3.0
    """The bound for the seconds from the last disturbance to an even share."""


class Process:
    """A process of the cluster. The states: running, leaving, frozen, gone."""

    def __init__(self, world: World, name: str, handlers: tuple[str, ...]) -> None:
        self.world, self.name, self.handlers = world, name, handlers
        self.share = PartitionShare(name, spreads_all=world.conditions.spreads_all)
        self.held: set[Slot] = set()
        self.halted: set[Slot] = set()
        self.idle_at: dict[Slot, float] = {}
        self.state = "running"
        self.stalled_until = 0.0
        self.lost_session = False
        self._applied_at = self._wrote_at = float("-inf")
        self._number = count(1)
        self._look_turn = self._round_turn = 0
        self._is_looking = self._look_again = self._is_moving = False
        self._is_taking = self._round_again = False

    @property
    def is_member(self) -> bool:
        return self.state == "running" and self.world.now >= self.stalled_until

    def wake(self, delay: float) -> None:
        """The wake-up ``locks``: read the tables now."""
        self._look_soon(delay)

    def start(self) -> None:
        self._look_soon(0.0)
        self._round_soon(0.0)

    # --- the loop that reads views ---

    def _look_soon(self, delay: float) -> None:
        """Read the tables after a delay, instead of the scheduled read. A read in progress finishes first."""
        self._look_again = self._is_looking
        if not self._is_looking:
            turn = self._look_turn = next(self._number)
            self.world.later(delay, lambda: self._look() if turn == self._look_turn else None)

    def _look(self) -> None:
        world, now = self.world, self.world.now
        if self.state not in ("running", "leaving"):
            return
        if now - self._applied_at >= 1.0:
            self._applied_at = now
            self.share.apply(self.handlers, world.counts(), now)
        if now - self._wrote_at >= HEARTBEAT / 2:
            self.write_row()
        view = world.view()
        self._is_looking = True
        world.later(world.random.choice((0.001, 0.002, 0.005, 0.02, 0.05)), lambda: self._looked(view, now))

    def _looked(self, view: View, now: float) -> None:
        world = self.world
        if self.state == "frozen":
            world.later(0.01, lambda: self._looked(view, now))  # the answer of the database waits in the socket
            return
        self._is_looking = False
        self.share.see(view.instances, view.leases, now)
        self._round_soon(0.0)
        delay = HEARTBEAT if world.conditions.wakes and self.share.is_steady else VIEW_EVERY
        delay = ROUND if self._is_moving or self.share.is_short else delay
        self._look_soon(0.0 if self._look_again else delay * world.random.uniform(0.75, 1.25))

    def write_row(self) -> None:
        self._wrote_at = self.world.now
        names = self.share.names_for_others(self.world.now)
        self.world.instances[self.name] = Instance(self.name, names, self.world.date())

    # --- the loop that takes locks ---

    def _round_soon(self, delay: float) -> None:
        self._round_again = self._is_taking
        if not self._is_taking:
            turn = self._round_turn = next(self._number)
            self.world.later(delay, lambda: self._round() if turn == self._round_turn else None)

    def _round(self) -> None:
        world, now = self.world, self.world.now
        if self.state not in ("running", "leaving"):
            return
        if self.lost_session:
            self.held, self.halted, self.lost_session = set(), set(), False
        self._run_handlers()
        plan = self.share.plan(self.held, lambda slot: int(self.idle_at.get(slot, 0.0) > now), now)
        self.halted |= set(plan.halt)
        self.halted -= set(plan.resume)
        self._is_moving = self.share.is_short or bool(plan.free or plan.halt or plan.release)
        self._is_taking = True
        for slot in plan.release:
            self._release(slot)
        for slot in self.halted & self.held:
            world.later(max(0.0, self.idle_at.get(slot, 0.0) - now) + 0.0005, lambda: self._round_soon(0.0))
        world.later(world.random.uniform(0.0005, 0.003), lambda: self._take(plan))

    def _take(self, plan: Plan) -> None:
        """Try to acquire shortly after the plan; slots released by the plan are free by then."""
        world = self.world
        if self.state == "frozen":
            world.later(0.01, lambda: self._take(plan))
            return
        self._is_taking = False
        if self.state == "gone" or self.lost_session:
            self._round_soon(0.0)
            return
        took = [slot for slot in (*plan.free, *plan.orphans) if world.take(self, slot)]
        if self.state == "leaving" and not self.held:
            self.state = "gone"
            world.instances.pop(self.name, None)
            world.changed()
        # A round follows each read. A separate round acts on an older view, so such rounds are rare while slots move.
        delay = 2 * ROUND if self._is_moving or not world.conditions.wakes else ROUND
        self._round_soon(0.0 if took or self._round_again else delay * world.random.uniform(0.75, 1.25))

    def _run_handlers(self) -> None:
        """Rows are found in slots that are held, and not halted."""
        random, conditions = self.world.random, self.world.conditions
        for slot in sorted(self.held - self.halted):
            if self.idle_at.get(slot, 0.0) <= self.world.now and random.random() < conditions.busy:
                takes_long = random.random() < conditions.long_runs
                self.idle_at[slot] = self.world.now + (random.uniform(1, 9) if takes_long else random.uniform(0, 0.02))

    def _release(self, slot: Slot) -> None:
        world = self.world
        if slot not in self.halted or self.idle_at.get(slot, 0.0) > world.now:
            world.problems.append(f"{self.name} gives {slot} back, which is not idle")
        self.held.discard(slot)
        self.halted.discard(slot)
        world.give_back(self, slot)


class View(Struct, frozen=True):
    """The tables at one point in time."""

    instances: list[Instance]
    leases: Mapping[Slot, SeenLease]


class World:
    """The database, the network and the time of a simulated cluster."""

    def __init__(self, seed: int, numbers: Mapping[str, int], conditions: Conditions) -> None:
        self.random = random.Random(seed)
        self.conditions = conditions
        self.now = 0.0
        self.numbers = dict(numbers)
        self.processes: list[Process] = []
        self.instances: dict[str, Instance] = {}
        self.leases: dict[Slot, SeenLease] = {}
        self.owners: dict[Slot, Process] = {}
        self.problems: list[str] = []
        self.moves = 0
        self.least = 0
        """The fewest moves that the joins and ends so far needed."""
        self.last_move = 0.0
        self.unowned: list[float] = []
        """The seconds in which a slot had no owner, for each time that a slot was taken."""
        self.evened: list[float] = []
        """The seconds from each disturbance to an even share."""
        self._free_since = dict.fromkeys(self.slots(), 0.0)
        self._disturbed: float | None = None
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = count()

    def slots(self) -> list[Slot]:
        return [Slot(name, partition) for name, number in self.numbers.items() for partition in range(number)]

    def counts(self) -> dict[str, PartitionCount]:
        return {name: PartitionCount(name, number, number, START) for name, number in self.numbers.items()}

    def date(self) -> datetime:
        return START + timedelta(seconds=self.now)

    def view(self) -> View:
        since = self.date() - timedelta(seconds=2 * HEARTBEAT)
        return View([one for one in self.instances.values() if one.last_seen_date > since], dict(self.leases))

    def later(self, delay: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._number), event))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end

    def wake_all(self) -> None:
        if self.conditions.wakes:
            for process in self.processes:
                process.wake(self.random.uniform(0.001, 0.005))

    # --- faults ---

    def join(self, *handlers: str) -> Process:
        process = Process(self, f"p{len(self.processes)}-{self.random.getrandbits(32):x}", handlers or (*self.numbers,))
        old, self.processes = len(self.members()), [*self.processes, process]
        if old == 0:
            self.least += len(self.slots())
            self._free_since = dict.fromkeys(self._free_since, self.now)
        else:
            self.least += sum(number // (old + 1) for number in self.numbers.values())
        process.share.apply(process.handlers, self.counts(), self.now)
        process.write_row()
        process.start()
        self.disturb()
        self.wake_all()
        return process

    def leave(self, process: Process) -> None:
        """SIGTERM."""
        self.least += len(process.held)
        process.share.leave()
        process.state = "leaving"
        process.write_row()
        process.start()
        self.disturb()
        self.wake_all()

    def crash(self, *processes: Process) -> None:
        """``kill -9`` of several processes at once."""
        for process in processes:
            self.least += len(process.held)
            process.state = "gone"
            self._end_session(process)
            process.held = set()
        self.disturb()

    def freeze(self, process: Process, seconds: float) -> None:
        """SIGSTOP. The server closes the session of a process that is unresponsive for too long."""
        process.state = "frozen"

        def end_session() -> None:
            if process.state == "frozen":
                process.lost_session = True
                self._end_session(process)
                self.disturb()

        def resume() -> None:
            process.state = "running"
            process.start()
            self.disturb()

        self.later(SILENCE, end_session)
        self.later(seconds, resume)

    def stall(self, process: Process, seconds: float) -> None:
        process.share.give_all(self.now, seconds=seconds)
        process.stalled_until = self.now + seconds
        process.write_row()
        self.disturb()
        self.wake_all()
        self.later(seconds + 0.001, lambda: (process.write_row(), self.disturb()) if process.is_member else None)

    def partition(self, name: str, number: int) -> None:
        """The number of partitions changes. A smaller number: the partitions beyond are empty."""
        old, self.numbers[name] = self.numbers[name], number
        for partition in range(old, number):
            if Slot(name, partition) not in self.owners:
                self._free_since[Slot(name, partition)] = self.now + 1.0  # each process reads the new count within 1 s
        for partition in range(number, old):
            self._free_since.pop(Slot(name, partition), None)
        self.disturb()

    def disturb(self) -> None:
        self._disturbed = self.now
        self.changed()

    # --- the locks ---

    def take(self, process: Process, slot: Slot) -> bool:
        if slot in self.owners:
            return False
        before = self.leases.get(slot)
        term = before.term + 1 if before is not None else 1
        follows_crash = before is not None and before.released_term < before.term
        self.owners[slot], self.leases[slot] = process, SeenLease(process.name, term, 0)
        process.held.add(slot)
        self.moves += 1
        self.last_move = self.now
        if slot in self._free_since:
            self._was_free(slot)
            del self._free_since[slot]
        died = process.share.owner_of(slot, term - 1) if follows_crash else None
        process.share.took(slot, self.now, follows_crash=follows_crash)
        if died is not None:
            process.share.forget(died)
            self.instances.pop(died, None)
        self.changed()
        return True

    def give_back(self, process: Process, slot: Slot) -> None:
        lease = self.leases[slot]
        self.leases[slot] = SeenLease(lease.owner, lease.term, lease.term)
        self._free(slot)
        self.wake_all()
        self.changed()

    def _end_session(self, process: Process) -> None:
        for slot in [slot for slot, owner in self.owners.items() if owner is process]:
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        del self.owners[slot]
        if slot in self.slots():
            self._free_since[slot] = self.now

    def _was_free(self, slot: Slot) -> None:
        seconds = max(0.0, self.now - self._free_since[slot])
        self.unowned.append(seconds)
        if seconds > self.conditions.longest_unowned:
            self.problems.append(f"{slot} had no owner for {seconds:.2f} s, until {self.now:.1f}")

    # --- the rules ---

    def members(self, name: str | None = None) -> list[Process]:
        return [one for one in self.processes if one.is_member and (name is None or name in one.handlers)]

    def changed(self) -> None:
        if self._disturbed is not None and self.is_even():
            self.evened.append(self.now - self._disturbed)
            if self.evened[-1] > self.conditions.longest_uneven:
                self.problems.append(f"the share was uneven for {self.evened[-1]:.2f} s, until {self.now:.1f}")
            self._disturbed = None

    def is_even(self) -> bool:
        """True if each slot has an owner, and no process has 2 slots more than another, of the slots of both."""
        slots = self.slots()
        if any(slot not in self.owners for slot in slots):
            return not self.members()
        groups = dict[frozenset[Process] | str, list[Slot]]()
        for slot in slots:
            is_single = self.numbers[slot.handler_name] == 1
            group = frozenset(self.members(slot.handler_name)) if is_single else slot.handler_name
            groups.setdefault(group, []).append(slot)
        for group, some in groups.items():
            held = Counter(self.owners[slot] for slot in some)
            members = self.members(group) if isinstance(group, str) else group
            numbers = [held[member] for member in members]
            if isinstance(group, frozenset) and not self.conditions.spreads_all:
                continue
            if sum(numbers) < len(some) or max(numbers) - min(numbers) > 1:
                return False
        return True

    def finish(self, *, is_quiet: bool = False) -> World:
        """Wait for a stable cluster and check the result. ``is_quiet``: no fault was due, so moves are counted."""
        self.run(25.0 + QUIET)
        for slot in self._free_since:
            if self.members():
                self._was_free(slot)
        if self.members() and not self.is_even():
            self.problems.append(f"still uneven: {Counter(owner.name for owner in self.owners.values())}")
        if self.last_move > self.now - QUIET:
            self.problems.append(f"a slot moved at {self.last_move:.1f}, although nothing had changed")
        if is_quiet and self.moves > 1.35 * self.least:
            self.problems.append(f"{self.moves} moves where {self.least} are enough")
        return self


# --- the scenarios ---


def joins(seed: int, conditions: Conditions, partitions: int = 16) -> World:
    """1 to 8 processes join, one each 5 s."""
    world = World(seed, {"score": partitions}, conditions)
    for _ in range(8):
        world.join()
        world.run(5.0 + world.random.random())
    return world.finish(is_quiet=True)


def crashes(seed: int, conditions: Conditions, partitions: int = 16) -> World:
    """2 of 8 processes crash at the same time."""
    world = World(seed, {"score": partitions}, conditions)
    _start(world, 8)
    world.crash(*world.random.sample(world.members(), 2))
    world.run(20.0 + world.random.random())
    return world.finish(is_quiet=True)


def deploy(seed: int, conditions: Conditions, partitions: int = 16) -> World:
    """A rolling deploy of 4 processes: a new process joins, then an old process leaves."""
    world = World(seed, {"score": partitions}, conditions)
    old = _start(world, 4)
    for process in old:
        world.join()
        world.run(4.0 + world.random.random())
        world.leave(process)
        world.run(4.0 + world.random.random())
    return world.finish(is_quiet=True)


def anything(seed: int, conditions: Conditions, partitions: int = 16, seconds: float = 60.0) -> World:
    """Joins, leaves, crashes, frozen and stalled processes, and other numbers of partitions, at random."""
    world = World(seed, {"score": partitions}, conditions)
    _start(world, world.random.randint(1, 4))
    end = world.now + seconds
    while world.now < end:
        world.run(world.random.choice((0.0, 0.1, 0.5, 2.0, 5.0)) * world.random.uniform(0.5, 1.5))
        members = world.members()
        kinds = ["join"] * (len(members) < 8) * 3
        kinds += ["leave", "crash", "freeze", "stall", "partition"] * (len(members) > 1)
        kind = world.random.choice(kinds)
        if kind == "join":
            world.join()
        elif kind == "partition":
            world.partition("score", world.random.choice((4, 16, 8)))
        elif kind == "freeze":
            world.freeze(world.random.choice(members), world.random.uniform(0.5, 15.0))
        elif kind == "stall":
            world.stall(world.random.choice(members), 10.0)
        else:
            (world.leave if kind == "leave" else world.crash)(world.random.choice(members))
    world.run(16.0)  # the frozen processes resume
    return world.finish()


def _start(world: World, number: int) -> list[Process]:
    """Start processes one after the other, and wait until the cluster is stable."""
    for _ in range(number):
        world.join()
        world.run(3.0 + world.random.random())
    world.run(5.0)
    return world.members()


def main(runs: int) -> None:
    print(f"{'':<28}{'moves (least)':<18}{'unowned':<10}{'even p50 / max':<18}problems")
    for partitions in (16, 64):
        for scenario in (joins, crashes, deploy, anything):
            for wakes in (True, False):
                worlds = [scenario(seed, Conditions(wakes=wakes), partitions) for seed in range(runs)]
                unowned = max(max(world.unowned) for world in worlds)
                evened = sorted(seconds for world in worlds for seconds in world.evened)
                moves, least = (sum(n) / runs for n in zip(*((w.moves, w.least) for w in worlds), strict=True))
                name = f"{scenario.__name__} {partitions}{'' if wakes else ', no wake-ups'}"
                even = f"{evened[len(evened) // 2]:.2f} / {evened[-1]:.2f}"
                print(f"{name:<28}{f'{moves:.1f} ({least:.0f})':<18}{unowned:<10.2f}{even:<18}", end="")
                print(sum(bool(world.problems) for world in worlds))
                for problem in [problem for world in worlds for problem in world.problems][:4]:
                    print("   ", problem)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
