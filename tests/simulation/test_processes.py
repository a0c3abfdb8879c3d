"""How simulated processes end: by exiting, by being killed, and by becoming unresponsive."""

from __future__ import annotations

import asyncio

import pytest

from outboxio import Outbox, Settings
from outboxio.testing import SimulationFailed, World
from outboxio.testing.simulation import Process
from outboxio.testing.simulation.simulate import Simulation

FAULTS_FOR = 30.0  # virtual seconds in which all faults of a seed happen
SILENCE = 1.8  # virtual seconds after which an unresponsive process loses its locks


def make_outbox(database: str) -> Outbox:
    return Outbox(database, namespace="app", settings=Settings(lock_heartbeat="1s", fanout_poll_delay="200ms"))


def go_off() -> None:
    """The callback of a timer."""


async def until_leaving(world: World, process: Process) -> None:
    process.request_stop()
    assert await world.until(lambda: not process.is_alive, 10)
    await world.restart(process)


def test_a_restarted_process_has_no_state_left() -> None:
    async def scenario(world: World) -> None:
        def leaving_a_timer(database: str) -> Outbox:
            asyncio.get_running_loop().call_later(20, go_off)
            return make_outbox(database)

        await until_leaving(world, await world.process(leaving_a_timer))
        await asyncio.sleep(60)  # the timer has fired at the end of the world

    with Simulation(scenario, faults=()) as simulation, pytest.raises(SimulationFailed, match="left the timer go_off"):
        simulation.check(1)


def test_a_process_that_leaves_no_state_is_restarted() -> None:
    async def scenario(world: World) -> None:
        process = await world.process(make_outbox)
        first = process.host
        await until_leaving(world, process)
        assert process.host is not first
        assert process.is_alive

    with Simulation(scenario, faults=()) as simulation:
        simulation.check(1)


def test_the_fault_kills_a_process_at_one_of_its_steps() -> None:
    died: list[int] = []

    async def scenario(world: World) -> None:
        process = await world.process(make_outbox)
        hosts = [process.host]
        while world.now < FAULTS_FOR:
            await asyncio.sleep(0.1)
            if process.host is not hosts[-1]:
                hosts.append(process.host)
        died.extend(host.steps for host in hosts if host.died_at is not None)

    with Simulation(scenario, faults=("kill",)) as simulation:
        for seed in (1, 5, 9):  # the other seeds kill at a step
            simulation.check(seed)
    assert len(died) >= 3
    assert len(set(died)) > 1


def test_an_unresponsive_process_loses_its_locks_before_its_first_heartbeat() -> None:
    async def scenario(world: World) -> None:
        first = await world.process(make_outbox)
        assert await world.until(lambda: {lock.host for lock in world.disk.locks.values()} == {first.host}, 10)
        assert await world.until(lambda: all(lock.proven_at for lock in world.disk.locks.values()), 0.5)
        await world.freeze(first)
        second = await world.process(make_outbox)
        assert await world.until(
            lambda: {lock.host for lock in world.disk.locks.values()} == {second.host}, SILENCE + 2
        )

    with Simulation(scenario, faults=(), lock_silence=SILENCE) as simulation:
        simulation.check(1)
