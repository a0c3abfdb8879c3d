"""The scenarios, each with the same seeds in every run, so that a failure is caused by the change."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from outboxio.model.lock_name import LockName
from outboxio.testing.simulation import SimulationFailed
from outboxio.testing.simulation.simulate import Simulation
from tests.kit.sources import ROOT
from tests.simulation.__main__ import command
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.sharing import HANDLERS, Cluster, partitions, uneven

SEEDS = 20
SHARED_SEEDS = 24
LOOKED_TOO_EARLY = 581, 593, 773  # the last fault ends before partitions are declared, or before former ones have moved
REPEATED = "operators", 7
TIMES = 10


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_guarantees_hold_with_every_seed(scenario: str) -> None:
    played = SCENARIOS[scenario]
    with played.simulation() as simulation:
        for seed in range(SEEDS):
            try:
                simulation.check(seed)
            except SimulationFailed as failed:
                pytest.fail(f"{failed}\n\nRepeat it: {command(scenario, seed)}", pytrace=False)


def test_partitions_are_shared_evenly_after_the_last_fault() -> None:
    with Simulation(partitions) as simulation:
        # The other seeds kill at any time, so the state would never be stable.
        for seed in (*range(1, 4 * SHARED_SEEDS, 4), *LOOKED_TOO_EARLY):
            simulation.check(seed)


def test_partitions_of_undeclared_handlers_are_not_shared_evenly() -> None:
    world = _world_of_two([])
    assert uneven(world, Cluster(world)) == [f"{name} is not declared" for name in HANDLERS]


def test_former_partitions_of_a_single_partition_are_shared_evenly() -> None:
    world = _world_of_two(["a"] * 8)
    cluster = Cluster(world)
    for name in HANDLERS:
        cluster.resize(name, 8, datetime(2026, 1, 1))
        cluster.resize(name, 1, datetime(2026, 1, 1))
    assert uneven(world, cluster) == [f"{name} is shared as {{'a': 7}} among 2 processes" for name in HANDLERS]
    world = _world_of_two(["a"] * 5 + ["b"] * 3)
    assert not uneven(world, cluster)


def test_a_seed_repeats_its_trace_in_every_interpreter() -> None:
    scenario, seed = REPEATED
    with SCENARIOS[scenario].simulation() as simulation:
        hashes = {simulation.play(seed, record=True).hash for _ in range(TIMES)}
    assert hashes == _hashes_of_new_interpreter("1") == _hashes_of_new_interpreter("2")
    assert len(hashes) == 1


def test_a_failing_seed_names_the_command_that_repeats_it() -> None:
    assert command("ordered", 17) == "python -m tests.simulation --scenario ordered --seed 17"


def _world_of_two(holders: list[str]) -> Any:
    """A world of the processes ``a`` and ``b``. ``holders``: the holder of each partition, for every handler."""
    hosts = {name: SimpleNamespace(name=name) for name in ("a", "b")}
    locks = {
        LockName("app", "dispatch", handler, partition).text: SimpleNamespace(host=hosts[holder])
        for handler in HANDLERS
        for partition, holder in enumerate(holders)
    }
    processes = [SimpleNamespace(is_alive=True, host=host) for host in hosts.values()]
    return SimpleNamespace(processes=processes, disk=SimpleNamespace(locks=locks))


def _hashes_of_new_interpreter(hash_seed: str) -> set[str]:
    scenario, seed = REPEATED
    ran = subprocess.run(
        [sys.executable, *command(scenario, seed).split()[1:], "--repeat", "1"], cwd=ROOT, capture_output=True,
        text=True, check=True, env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    [line] = [line for line in ran.stdout.splitlines() if line.startswith(f"{scenario} {seed}: ")]
    return set(line.split()[2:])
