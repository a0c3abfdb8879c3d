"""The faults, each as a class: ``inject`` starts the fault, waits for its duration, and undoes it.

A fault chooses its victim and strength by the random numbers of the run, so that a seed repeats the schedule.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from random import Random
from typing import TYPE_CHECKING, ClassVar

from tests.chaos.handlers import HANDLERS

if TYPE_CHECKING:
    from tests.chaos.arena import Arena

SERVERS = frozenset({"postgres", "mysql", "mariadb"})
ALL = SERVERS | {"sqlite"}
PARTITIONED = [name for name, kind in HANDLERS.items() if kind.partitions > 1]


class Fault(ABC):
    """A single kind of fault."""

    name: ClassVar[str]
    dialects: ClassVar[frozenset[str]] = ALL

    def is_possible(self, arena: Arena) -> bool:
        return arena.dialect in self.dialects

    @abstractmethod
    async def inject(self, arena: Arena, chance: Random) -> str:
        """Cause the fault, undo it, and return the victim and the strength."""


def around_heartbeats(arena: Arena, chance: Random) -> float:
    """Seconds: short, or longer than a holder is trusted."""
    return arena.heartbeat * (chance.uniform(0.1, 1.5) if chance.random() < 0.3 else chance.uniform(2.5, 8))


# --- what happens to processes --------------------------------------------------------------------


class Kill(Fault):
    """``kill -9`` of an instance, and a successor."""

    name = "kill"

    async def inject(self, arena: Arena, chance: Random) -> str:
        async with arena.victim(chance) as instance:
            instance.kill()
            await arena.replace(instance)
            return instance.name


class KillProducer(Fault):
    """``kill -9`` of a producer: the outcome of actions in progress is unknown."""

    name = "kill-producer"

    async def inject(self, arena: Arena, chance: Random) -> str:
        producer = chance.choice(arena.producers)
        producer.kill()
        await arena.replace(producer)
        return producer.name


class Freeze(Fault):
    """SIGSTOP, briefly or for longer than a holder is trusted, and SIGCONT."""

    name = "freeze"

    async def inject(self, arena: Arena, chance: Random) -> str:
        seconds = around_heartbeats(arena, chance)
        async with arena.victim(chance) as instance:
            instance.freeze()
            await asyncio.sleep(seconds)
            instance.thaw()
            return f"{instance.name} for {seconds:.1f} s"


class Terminate(Fault):
    """SIGTERM, and a successor: a deployment."""

    name = "terminate"

    async def inject(self, arena: Arena, chance: Random) -> str:
        async with arena.victim(chance) as instance:
            await arena.leave(instance)
            await arena.replace(instance)
            return instance.name


class Join(Fault):
    """One more instance starts, and after a while an instance leaves, or is killed, without a successor."""

    name = "join"

    async def inject(self, arena: Arena, chance: Random) -> str:
        joined = await arena.join()
        await asyncio.sleep(chance.uniform(1, 4))
        killed = chance.random() < 0.5
        async with arena.victim(chance) as instance:
            await arena.leave_for_good(instance, killed=killed)
            return f"{joined.name}, and {instance.name} {'is killed' if killed else 'leaves'}"


# --- what operators do ---------------------------------------------------------------------------


class Repartition(Fault):
    """The number of partitions of a handler is raised or lowered."""

    name = "repartition"
    dialects = SERVERS

    async def inject(self, arena: Arena, chance: Random) -> str:
        handler, number = chance.choice(PARTITIONED), chance.choice((1, 2, 4, 8, 16))
        await arena.repartition(handler, number)
        return f"{handler} to {number}"


# --- what handlers do ----------------------------------------------------------------------------


class Block(Fault):
    """A handler blocks the event loop for longer than a holder is trusted."""

    name = "block"

    async def inject(self, arena: Arena, chance: Random) -> str:
        seconds = around_heartbeats(arena, chance)
        return await arena.disturb(chance, "block", seconds)


class Ignore(Fault):
    """A handler ignores its cancellation."""

    name = "ignore"

    async def inject(self, arena: Arena, chance: Random) -> str:
        return await arena.disturb(chance, "ignore", arena.handler_timeout * chance.uniform(1.2, 3))


class Exit(Fault):
    """A handler ends its process."""

    name = "exit"

    async def inject(self, arena: Arena, chance: Random) -> str:
        async with arena.victim(chance) as instance:
            instance.send("exit")
            if not await instance.is_gone_within(10):
                instance.kill()  # the instance called no handler in that time, and must not block unexpectedly later
            await arena.replace(instance)
            return instance.name


class Exhaust(Fault):
    """All connections of an instance's pool are in use."""

    name = "exhaust"
    dialects = SERVERS

    async def inject(self, arena: Arena, chance: Random) -> str:
        return await arena.disturb(chance, "exhaust", around_heartbeats(arena, chance))


# --- what the database does ----------------------------------------------------------------------


class Restart(Fault):
    """The server goes down and comes back."""

    name = "restart"
    dialects = SERVERS

    def is_possible(self, arena: Arena) -> bool:
        return super().is_possible(arena) and arena.server is not None

    async def inject(self, arena: Arena, chance: Random) -> str:
        assert arena.server is not None
        seconds = chance.uniform(0, 3)
        await asyncio.to_thread(arena.server.stop)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(arena.server.start)
        return f"down for {seconds:.1f} s"


class EndSessions(Fault):
    """An administrator ends sessions."""

    name = "end-sessions"
    dialects = SERVERS

    async def inject(self, arena: Arena, chance: Random) -> str:
        sessions = await arena.session_ids()
        some = chance.sample(sessions, chance.randint(0, len(sessions)))
        await arena.acts.end(some)
        return f"{len(some)} of {len(sessions)}"


class Snapshot(Fault):
    """A transaction holds its snapshot."""

    name = "snapshot"

    async def inject(self, arena: Arena, chance: Random) -> str:
        seconds = chance.uniform(1, 5)
        await arena.hold_snapshot(seconds)
        return f"for {seconds:.1f} s"


class Refuse(Fault):
    """The disk is full: no outcome can be written, or no failure."""

    name = "refuse"

    async def inject(self, arena: Arena, chance: Random) -> str:
        seconds, what = chance.uniform(0.5, 3), chance.choice(("all", "failures"))
        await arena.switch("refuses", what)
        await asyncio.sleep(seconds)
        await arena.switch("refuses", "nothing")
        return f"{what} for {seconds:.1f} s"


# --- what the network does -----------------------------------------------------------------------


class Cut(Fault):
    """All connections of a process are cut."""

    name = "cut"
    dialects = SERVERS

    async def inject(self, arena: Arena, chance: Random) -> str:
        process = arena.any_process(chance)
        return f"{process.network.cut()} connections of {process.name}"


class BlackHole(Fault):
    """A host becomes silent: its connections stay open, and no packet gets through."""

    name = "black-hole"
    dialects = SERVERS

    async def inject(self, arena: Arena, chance: Random) -> str:
        seconds = around_heartbeats(arena, chance)
        async with arena.victim(chance) as instance:
            instance.network.stall()
            await asyncio.sleep(seconds)
            is_cut = chance.random() < 0.5
            if is_cut:
                instance.network.cut()
            instance.network.resume()
            return f"{instance.name} for {seconds:.1f} s{', then cut' * is_cut}"


class Delay(Fault):
    """The network is slow."""

    name = "delay"
    dialects = SERVERS

    async def inject(self, arena: Arena, chance: Random) -> str:
        process, late = arena.any_process(chance), chance.uniform(0.01, 0.2)
        process.network.delay(late)
        await asyncio.sleep(chance.uniform(0.5, 3))
        process.network.delay(0)
        return f"{process.name} by {late * 1000:.0f} ms"


class CutAtCommit(Fault):
    """A connection is cut as COMMIT is sent, before or after the server receives COMMIT."""

    name = "cut-at-commit"
    dialects = SERVERS

    async def inject(self, arena: Arena, chance: Random) -> str:
        process, lets_through = arena.any_process(chance), chance.random() < 0.5
        process.network.cut_at(b"commit", lets_through=lets_through)
        await asyncio.sleep(0.2)
        return f"{process.name}, {'after' if lets_through else 'before'}"


# --- what time it is -----------------------------------------------------------------------------


class Clocks(Fault):
    """An instance starts on a host whose clock is up to ten minutes wrong."""

    name = "clocks"
    dialects = SERVERS

    async def inject(self, arena: Arena, chance: Random) -> str:
        minutes = chance.choice((-10, 10))
        async with arena.victim(chance) as instance:
            await arena.leave(instance)
            await arena.replace(instance, minutes=minutes)
            return f"{minutes:+d} minutes"


FAULTS = {
    fault.name: fault
    for fault in (
        Kill(), KillProducer(), Freeze(), Terminate(), Join(), Repartition(), Block(), Ignore(), Exit(), Exhaust(),
        Restart(), EndSessions(), Snapshot(), Refuse(), Cut(), BlackHole(), Delay(), CutAtCommit(), Clocks(),
    )
}  # fmt: skip
