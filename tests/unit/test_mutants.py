"""Every mutant of the chaos runs applies to the current source."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.chaos.checker import INVARIANTS
from tests.chaos.mutation import MUTANTS, Mutant
from tests.kit.sources import ROOT

PATCHES = sorted(MUTANTS.glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_mutant_applies_to_the_tree(patch: Path) -> None:
    done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, f"update the patch to the current code\n{done.stderr}"


def test_every_invariant_has_a_mutant() -> None:
    assert {Mutant.read(patch).invariant for patch in PATCHES} == set(INVARIANTS)
