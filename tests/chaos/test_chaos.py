"""A short chaos run on every database: ``make chaos`` runs longer ones, and says how to repeat what goes wrong."""

from __future__ import annotations

import os
from pathlib import Path

from tests.app import Look
from tests.chaos.arena import Place
from tests.chaos.faults import FAULTS
from tests.chaos.run import Plan, run, schedule
from tests.servers import DIALECTS

SECONDS = float(os.environ.get("OUTBOXIO_CHAOS_SECONDS", "4"))
RATE = 20  # actions in a second: what piles up while nobody works has to be worked off
SEED = int(os.environ.get("OUTBOXIO_CHAOS_SEED", "1"))


async def test_whatever_goes_wrong_the_history_keeps_what_is_promised(database_url: str, tmp_path: Path) -> None:
    # Each database begins with other faults, for there is no time for all.
    seed = SEED + list(DIALECTS).index(Look(database_url).dialect)
    result = await run(Place(database_url, tmp_path), Plan(seed, SECONDS, tuple(FAULTS), rate=RATE))
    assert result.violations == [], f"seed {seed}; the histories are in {tmp_path}"
    assert result.counts["effects"], "nothing happened"


def test_a_seed_repeats_the_schedule() -> None:
    plan, faults = Plan(7, 20, tuple(FAULTS)), list(FAULTS.values())
    assert schedule(plan, faults) == schedule(plan, faults)
    assert schedule(plan, faults) != schedule(Plan(8, 20, tuple(FAULTS)), faults)
