"""A short chaos run on PostgreSQL and on MariaDB.

``make chaos`` runs longer, on every database, and prints how to repeat a failed run. On SQLite the simulation
injects the same faults (tests/simulation).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos import partitions
from tests.chaos.arena import Place
from tests.chaos.faults import FAULTS
from tests.chaos.run import Plan, run, schedule
from tests.kit.app import Look
from tests.kit.servers import DIALECTS

SECONDS = float(os.environ.get("OUTBOXIO_TEST_CHAOS_SECONDS", "4"))
RATE = 15  # actions per second: the backlog of an outage must be processed
SEED = int(os.environ.get("OUTBOXIO_TEST_CHAOS_SEED", "1"))


@pytest.mark.one_of_family
@pytest.mark.timeout(600)  # all processes of a run, and the other parts of the test run, share two cores
async def test_every_fault_keeps_the_guarantees(server_url: str, tmp_path: Path) -> None:
    # Each database starts with different faults, because there is not enough time for all.
    seed = SEED + list(DIALECTS).index(Look(server_url).dialect)
    result = await run(Place(server_url, tmp_path), Plan(seed, SECONDS, tuple(FAULTS), rate=RATE))
    assert result.violations == [], f"seed {seed}; the histories are in {tmp_path}"
    assert result.counts["effects"], "nothing happened"


async def test_a_short_run_of_the_ordered_load_test_works(postgres_url: str, tmp_path: Path) -> None:
    plan = partitions.Plan(rows=600, rate=150, keys=20, steps=("join", "16 partitions", "kill -9"))
    report = await partitions.run(Place(postgres_url, tmp_path), plan)
    assert (report.violations, report.repeated_in_vain) == ([], [])
    assert len(report.waits[0].seconds) == 600


def test_a_seed_repeats_the_schedule() -> None:
    plan, faults = Plan(7, 20, tuple(FAULTS)), list(FAULTS.values())
    assert schedule(plan, faults) == schedule(plan, faults)
    assert schedule(plan, faults) != schedule(Plan(8, 20, tuple(FAULTS)), faults)
