"""A guarantee that is broken on purpose is detected. ``python -m tests.simulation.mutation`` tries all mutants."""

from __future__ import annotations

import subprocess

import pytest

from tests.kit.sources import ROOT
from tests.simulation.mutation import Mutant, mutants, seeds_until_caught
from tests.simulation.scenarios import SCENARIOS

MUTANTS = {mutant.patch.stem: mutant for mutant in mutants()}
CAUGHT = {
    "failure-is-success": 1,
    "gap-in-the-key-is-ignored": 6,
    "lock-goes-before-the-runs": 2,
    "ordering-is-not-enforced": 0,
    "refused-outcomes-are-counted": 0,
    "term-stays": 0,
}
"""Mutants that are caught soon, with the first seed that catches each. A change to a scenario may change the seed."""
DEFECTS = {
    "drain-looks-once": 36,
    "key-is-written-in-any-order": 189,
    "rest-of-key-continues": 12,
    "start-raises-the-drivers-error": 9,
    "timer-of-a-loop-is-left": 0,
    "timer-of-waiters-is-left": 0,
}
"""Defects of outboxio that the simulation has found, each with a seed that finds it again."""
MORE = 8  # seeds within which a mutant is caught after such a change


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_applies_and_names_a_scenario(mutant: Mutant) -> None:
    done = subprocess.run(
        ["git", "apply", "--check", str(mutant.patch)], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, f"update the patch to the current code\n{done.stderr}"
    assert mutant.scenario in SCENARIOS


@pytest.mark.parametrize("name", CAUGHT)
def test_a_broken_guarantee_is_found_within_a_few_seeds(name: str) -> None:
    found = seeds_until_caught(MUTANTS[name], range(CAUGHT[name] + MORE))

    assert found.seed is not None, f"the simulation misses this: {MUTANTS[name].what}"


@pytest.mark.parametrize("name", DEFECTS)
def test_the_seed_of_a_defect_finds_it_again(name: str) -> None:
    found = seeds_until_caught(MUTANTS[name], range(DEFECTS[name], DEFECTS[name] + 1))

    assert found.seed is not None, f"find a new seed: python -m tests.simulation.mutation --only {name}"
