"""When the connection of a loop is dropped, and which other connections become suspect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from outboxio.loops.owner import EventLoopGuard
from outboxio.storage.connections.loop_connection import MAX_FAILURES, BaseLoopConnection, LoopSource, ServerIsReadOnly


class Wire:
    """Stands for a connection."""

    def __init__(self) -> None:
        self.is_closed = False


class RefusedToWrite(Exception):
    """The error of a standby."""


class Unavailable(Exception):
    """The error that outboxio raises instead."""


class Others:
    """Stands for the other connections, and records the calls."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def opened(self) -> None:
        self.events.append("opened")

    def unanswered(self) -> None:
        self.events.append("unanswered")

    def not_writable(self, error: Exception, *, is_final: bool) -> Exception:
        self.events.append("final failure" if is_final else "failure")
        return Unavailable(str(error))


class LoopConnection(BaseLoopConnection):
    """A connection without a dialect."""

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
            raise ServerIsReadOnly("a standby")

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


async def test_a_connection_survives_an_unrelated_failure() -> None:
    dedicated = LoopConnection()
    for _ in range(3):
        await fails(dedicated, MAX_FAILURES - 1)
        await dedicated.use(works)

    assert len(dedicated.wires) == 1
    assert dedicated.others.events == ["opened"]


async def test_repeated_failures_replace_the_connection() -> None:
    dedicated = LoopConnection()
    await fails(dedicated, MAX_FAILURES + 1)
    assert len(dedicated.wires) == 2

    await fails(dedicated, MAX_FAILURES - 1)
    await dedicated.use(works)
    assert len(dedicated.wires) == 3


async def test_a_timeout_replaces_the_connection() -> None:
    dedicated = LoopConnection()
    with pytest.raises(TimeoutError):
        await dedicated.use(raising(TimeoutError()))

    assert dedicated.wires[0].is_closed
    assert dedicated.others.events == ["opened", "unanswered"]


async def test_a_connection_to_a_read_only_server_is_replaced() -> None:
    dedicated = LoopConnection()
    with pytest.raises(Unavailable, match="read-only") as caught:
        await dedicated.use(raising(RefusedToWrite("read-only")))

    assert isinstance(caught.value.__cause__, RefusedToWrite)
    assert dedicated.wires[0].is_closed
    assert dedicated.others.events == ["opened", "final failure"]


async def test_locks_are_released_if_every_new_connection_is_read_only() -> None:
    dedicated = LoopConnection()
    dedicated.leads_to_standby = True
    for _ in range(MAX_FAILURES):
        assert "final failure" not in dedicated.others.events
        with pytest.raises(Unavailable, match="a standby"):
            await dedicated.ready()

    assert dedicated.others.events == ["failure"] * (MAX_FAILURES - 1) + ["final failure"]
    dedicated.leads_to_standby = False
    await dedicated.use(works)
    assert all(wire.is_closed for wire in dedicated.wires[:-1])


async def test_a_renewed_connection_closes_after_its_running_statement() -> None:
    dedicated = LoopConnection()

    async def suspect(wire: Wire) -> None:
        dedicated.renew()
        assert not wire.is_closed

    await dedicated.use(suspect)
    await dedicated.use(works)
    dedicated.renew()
    assert [wire.is_closed for wire in dedicated.wires] == [True, True]
