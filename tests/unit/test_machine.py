"""The engine gets everything nondeterministic from one module, which a simulation replaces."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import pytest

from outboxio.support import machine
from outboxio.support.clock import EPOCH, steady_now, utc_now
from outboxio.support.duration import jittered
from outboxio.support.ids import ProcessName, uuid7
from tests.kit.sources import PACKAGE, modules, tree_of

T = TypeVar("T")

OUTSIDE = ("cli/", "integrations/", "testing/simulation/")
"""Programs, and libraries with clocks and names of their own, around the engine; and the simulated machine."""
OWN = {
    "support/machine.py": "is the machine",
    "health/systemd.py": "the socket of systemd, which names this process of the operating system",
    "storage/connections/driver.py": "options of a driver's sockets",
    "storage/postgres/psycopg_adapter.py": "the end of a connection whose answer is late",
    "dashboard/guard.py": "the token of a page against forged requests",
}
MODULES = {"time", "random", "secrets", "socket"}
FUNCTIONS = {"os.getpid", "os.urandom", "datetime.now", "datetime.utcnow", "uuid.uuid1", "uuid.uuid4"}


def used_in(tree: ast.Module) -> Iterator[str]:
    """What a file takes from the standard library that is not deterministic."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield node.module
        elif isinstance(node, ast.ImportFrom):
            yield from {f"{node.module}.{alias.name}" for alias in node.names} & FUNCTIONS
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from {f"{node.value.id}.{node.attr}"} & FUNCTIONS


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_only_the_machine_module_has_clocks_and_randomness() -> None:
    used = {name_of(path): set(used_in(tree_of(path))) for path in modules()}
    wrong = {name for name, found in used.items() if found and not name.startswith(OUTSIDE)}
    assert wrong == set(OWN)


def test_modules_never_keep_a_function_of_the_machine() -> None:
    """An imported name would keep referring to the former machine."""
    kept = {
        alias.name
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "outboxio.support.machine"
        for alias in node.names
    }
    assert kept == {"in_forked_children"}


class Simulated:
    """A machine whose values are known."""

    sqlite_thread: Any = None
    file_locks = None
    background = None

    def __init__(self) -> None:
        self.now = 1000
        self.kept: dict[str, Any] = {}

    def monotonic(self) -> float:
        return self.now / 1e9

    perf_counter = monotonic

    def time_ns(self) -> int:
        return self.now

    steady_ns = time_ns

    def sleep(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)

    def uniform(self, low: float, high: float) -> float:
        return high

    def random_bits(self) -> int:
        return 7

    def token(self, size: int) -> str:
        return "ab" * size

    def host(self) -> str:
        return "simulated"

    def pid(self) -> int:
        return 1

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    def call_in_thread(self, function: Callable[..., T], *args: Any, limiter: object = None) -> Awaitable[T]:
        return self._call(function, *args)

    def local(self, key: str, make: Callable[[], T]) -> T:
        made: T = self.kept.setdefault(key, make())
        return made


@pytest.fixture
def simulated() -> Iterator[Simulated]:
    simulated = Simulated()
    former = machine.use(simulated)
    yield simulated
    machine.use(former)


def test_another_machine_supplies_times_names_and_pauses(simulated: Simulated) -> None:
    simulated.now = 3_000_000
    assert {utc_now(), steady_now()} == {EPOCH + timedelta(milliseconds=3)}
    assert (uuid7(), jittered(1.0)) == (UUID("00000000-0003-7000-8000-000000000007"), 1.1)
    assert ProcessName().text == "simulated:1:abababab"


def test_the_former_machine_is_restored() -> None:
    names = [name for name in vars(machine.Machine) if not name.startswith("_")]
    before = [getattr(machine, name) for name in names]
    simulated = Simulated()
    assert machine.use(simulated) is machine.REAL
    assert machine.use(machine.REAL) is simulated
    assert [getattr(machine, name) for name in names] == before


def test_an_object_of_a_process_is_made_once_per_machine() -> None:
    made = machine.local("test", list[int])
    assert machine.local("test", list[int]) is made
    former = machine.use(Simulated())
    try:
        assert machine.local("test", list[int]) is not made
    finally:
        machine.use(former)


async def test_functions_are_called_in_a_thread_with_the_context() -> None:
    assert await machine.call_in_thread(threading.get_ident) != threading.get_ident()


async def test_sqlite_connections_run_in_the_threads_of_the_machine(simulated: Simulated) -> None:
    import sqlite3

    from outboxio.storage.sqlite.thread import Receiver, ThreadConnection

    class Thread:
        def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
            self.connection = connect()

        def put(self, work: Callable[[sqlite3.Connection], Any] | None, answer: Receiver) -> None:
            asyncio.get_running_loop().call_later(0, answer, work and work(self.connection), None)
            if work is None:
                self.connection.close()

        def run_blocking(self, work: Callable[[sqlite3.Connection], T]) -> T:
            return work(self.connection)

    simulated.sqlite_thread = Thread
    machine.use(simulated)  # again, because the member is new
    connection = ThreadConnection(lambda: sqlite3.connect(":memory:"))  # a connection of this thread only
    assert await connection.submit(lambda sqlite: sqlite.execute("SELECT 1").fetchone()) == (1,)
    assert connection.run_blocking(lambda sqlite: sqlite.execute("SELECT 2").fetchone()) == (2,)
    await connection.close()
