"""A promise that is broken on purpose is found broken: ``python -m tests.simulation.mutation`` tries all mutants."""

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
    "order-is-not-asked-for": 0,
    "refused-outcomes-are-counted": 0,
    "term-stays": 0,
}
"""Mutants that are caught soon, and the first seed that catches each, which a change to a scenario may change."""
DEFECTS = {
    "drain-looks-once": 36,
    "key-is-written-in-any-order": 189,
    "rest-of-key-goes-on": 12,
    "start-raises-the-drivers-error": 9,
    "timer-of-a-loop-is-left": 0,
    "timer-of-waiters-is-left": 0,
}
"""Defects of outboxio that the simulation has found, and a seed that finds each if it is put back."""
MORE = 8  # seeds within which a mutant is caught after such a change, too


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_applies_and_names_a_scenario(mutant: Mutant) -> None:
    done = subprocess.run(
        ["git", "apply", "--check", str(mutant.patch)], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, f"write the patch anew against the code as it is now\n{done.stderr}"
    assert mutant.scenario in SCENARIOS


@pytest.mark.parametrize("name", CAUGHT)
def test_a_broken_promise_is_found_within_a_few_seeds(name: str) -> None:
    found = seeds_until_caught(MUTANTS[name], range(CAUGHT[name] + MORE))

    assert found.seed is not None, f"the simulation misses this: {MUTANTS[name].what}"


@pytest.mark.parametrize("name", DEFECTS)
def test_the_seed_of_a_defect_finds_it_again(name: str) -> None:
    found = seeds_until_caught(MUTANTS[name], range(DEFECTS[name], DEFECTS[name] + 1))

    assert found.seed is not None, f"put in a new seed: python -m tests.simulation.mutation --only {name}"
