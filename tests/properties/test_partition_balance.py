"""A simulated cluster keeps every slot owned, becomes even, and moves few slots; three mutants do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboxio.runtime import lock_plan, partition_share
from outboxio.runtime.partition_share import PartitionShare
from tests.kit.partitions import Conditions, World, anything, crashes, deploy, joins

pytestmark = pytest.mark.slow

MOST_MOVES = {joins: 1.15, deploy: 1.15, crashes: 1.25}
"""By scenario, of the least possible, in all runs together. After a crash a single process takes all orphans at once,
and then gives the surplus away."""
CALM = {"longest_unowned": 1.3, "longest_uneven": 3.0}


Scenario = Callable[[int, Conditions, int], World]


def quiet_problems(scenario: Scenario, *, wakes: bool, runs: int = 2, partitions: int = 16) -> list[str]:
    """The problems of a scenario without other faults."""
    worlds = [scenario(seed, Conditions(wakes=wakes, **CALM), partitions) for seed in range(runs)]
    problems = [problem for world in worlds for problem in world.problems]
    moves, least = sum(world.moves for world in worlds), sum(world.least for world in worlds)
    return problems + [f"{moves} moves where {least} are enough"] * (moves > MOST_MOVES[scenario] * least)


@pytest.mark.parametrize("wakes", [True, False], ids=["wake-ups", "no wake-ups"])
@pytest.mark.parametrize(("scenario", "partitions"), [(joins, 7), (joins, 16), (crashes, 16), (deploy, 16)])
def test_a_quiet_cluster_moves_few_slots_and_soon_is_even(scenario: Scenario, partitions: int, wakes: bool) -> None:
    assert quiet_problems(scenario, wakes=wakes, partitions=partitions) == []


@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), wakes=st.booleans())
def test_every_slot_is_owned_again_after_any_events(seed: int, wakes: bool) -> None:
    conditions = Conditions(wakes=wakes, long_runs=0.02, longest_unowned=4.0, longest_uneven=60.0)

    assert anything(seed, conditions, seconds=25.0).problems == []


def test_the_simulation_fails_without_evidence_of_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionShare, "owner_of", lambda *_: None)

    assert quiet_problems(crashes, wakes=True, runs=1) != []


def test_the_simulation_fails_with_a_remainder_by_hash_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    true_quotas = lock_plan.quotas

    def by_hash(members: Collection[str], counts: Mapping[str, int], slots: int, key: str) -> dict[str, int]:
        return true_quotas(members, Counter(), slots, key)

    monkeypatch.setattr(lock_plan, "quotas", by_hash)

    assert quiet_problems(joins, wakes=True, partitions=7) != []


def test_the_simulation_fails_if_full_processes_take_released_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partition_share, "LEFT_OVER_AGE", 0.0)

    assert quiet_problems(joins, wakes=True) != []
