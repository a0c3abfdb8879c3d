"""When the connection of a loop is given up, and which connections become suspect then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from outboxio.loops.owner import EventLoopGuard
from outboxio.storage.connections.loop_connection import MOST_FAILURES, BaseLoopConnection, LoopSource, OnlyReads


class Wire:
    """Stands for a connection."""

    def __init__(self) -> None:
        self.is_closed = False


class RefusedToWrite(Exception):
    """The error of a standby."""


class Unavailable(Exception):
    """The error that outboxio raises instead."""


class Others:
    """Stands for the connections beside this one, and records their messages."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def opened(self) -> None:
        self.told.append("opened")

    def unanswered(self) -> None:
        self.told.append("unanswered")

    def does_not_write(self, error: Exception, *, gives_up: bool) -> Exception:
        self.told.append("gives up" if gives_up else "tries again")
        return Unavailable(str(error))


class LoopConnection(BaseLoopConnection):
    """A connection of no dialect."""

    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self.others = Others()
        self.leads_to_standby = False
        guard = EventLoopGuard.of_shard("default")
        super().__init__(LoopSource(self._open_wire, self._close_wire, self.others, guard))

    async def _open_wire(self) -> Wire:
        self.wires.append(Wire())
        return self.wires[-1]

    async def _close_wire(self, wire: Wire) -> None:
        wire.is_closed = True

    async def prepare(self, connection: Wire) -> None:
        if self.leads_to_standby:
            raise OnlyReads("a standby")

    async def restore(self, connection: Wire) -> None: ...

    def is_closed(self, connection: Wire) -> bool:
        return connection.is_closed

    def drop(self, connection: Wire) -> None:
        connection.is_closed = True

    def is_read_only(self, error: Exception) -> bool:
        return isinstance(error, RefusedToWrite)


def raising(error: Exception) -> Callable[[Wire], Awaitable[None]]:
    async def work(wire: Wire) -> None:
        raise error

    return work


async def works(wire: Wire) -> None: ...


async def fails(dedicated: LoopConnection, times: int) -> None:
    for _ in range(times):
        with pytest.raises(ValueError, match="whatever"):
            await dedicated.use(raising(ValueError("whatever")))


async def test_a_connection_survives_a_failure_that_says_nothing_about_it() -> None:
    dedicated = LoopConnection()
    for _ in range(3):
        await fails(dedicated, MOST_FAILURES - 1)
        await dedicated.use(works)

    assert len(dedicated.wires) == 1
    assert dedicated.others.told == ["opened"]


async def test_after_some_failures_in_a_row_another_connection_is_tried_whatever_the_error() -> None:
    dedicated = LoopConnection()
    await fails(dedicated, MOST_FAILURES + 1)
    assert len(dedicated.wires) == 2

    await fails(dedicated, MOST_FAILURES - 1)
    await dedicated.use(works)
    assert len(dedicated.wires) == 3


async def test_a_connection_on_which_nothing_was_answered_is_not_used_again() -> None:
    dedicated = LoopConnection()
    with pytest.raises(TimeoutError):
        await dedicated.use(raising(TimeoutError()))

    assert dedicated.wires[0].is_closed
    assert dedicated.others.told == ["opened", "unanswered"]


async def test_a_connection_to_a_server_that_does_not_write_is_not_used_again() -> None:
    dedicated = LoopConnection()
    with pytest.raises(Unavailable, match="read-only") as caught:
        await dedicated.use(raising(RefusedToWrite("read-only")))

    assert isinstance(caught.value.__cause__, RefusedToWrite)
    assert dedicated.wires[0].is_closed
    assert dedicated.others.told == ["opened", "gives up"]


async def test_the_locks_are_left_to_others_where_no_new_connection_leads_to_a_server_that_writes() -> None:
    dedicated = LoopConnection()
    dedicated.leads_to_standby = True
    for _ in range(MOST_FAILURES):
        assert "gives up" not in dedicated.others.told
        with pytest.raises(Unavailable, match="a standby"):
            await dedicated.ready()

    assert dedicated.others.told == ["tries again"] * (MOST_FAILURES - 1) + ["gives up"]
    dedicated.leads_to_standby = False
    await dedicated.use(works)
    assert all(wire.is_closed for wire in dedicated.wires[:-1])


async def test_a_connection_that_is_in_doubt_ends_with_the_statement_that_runs_on_it() -> None:
    dedicated = LoopConnection()

    async def suspect(wire: Wire) -> None:
        dedicated.renew()
        assert not wire.is_closed

    await dedicated.use(suspect)
    await dedicated.use(works)
    dedicated.renew()
    assert [wire.is_closed for wire in dedicated.wires] == [True, True]
