"""The benchmarks run: every contestant that needs no other project, with a few hundred events."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.contestants import OURS
from benchmarks.results import Results

DRAIN, EXECUTE = "1 type, 1 handler", "32 callers"
MEASURED = {
    "sqlite": {"drain": DRAIN, "fanout": DRAIN, "execute": EXECUTE, "sustained": "plain SQL", "backlog": "finished"},
    "postgres": {"drain": DRAIN, "execute": EXECUTE},
}
PROJECT = Path(__file__).parents[2]


UNRESTRICTED = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOXIO_TEST_")}


@pytest.mark.parametrize("dialect", MEASURED)
def test_every_outboxio_contestant_measures_its_result(dialect: str, tmp_path: Path) -> None:
    kept, scenarios = tmp_path / "kept.json", MEASURED[dialect]
    command = [sys.executable, "-m", "benchmarks", "--size", "tiny", "--only", dialect, "--rounds", "1", "--no-peers"]
    command += ["--scenario", ",".join(scenarios), "--setting", *set(scenarios.values()), "--json", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env=UNRESTRICTED, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    results = msgspec.json.decode(kept.read_bytes(), type=Results)
    if dialect not in {database.dialect for database in results.databases}:
        pytest.skip(f"no {dialect} here: {results.missing}")
    assert [run.error for run in results.failures()] == []
    assert {run.scenario for run in results.runs} == set(scenarios)
    assert {run.contestant for run in results.runs} == {one.name for one in OURS if dialect in one.dialects}
    assert "Executing actions" in done.stdout


def test_the_price_of_traces_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.traces", "--only", "sqlite", "--events", "200", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env=UNRESTRICTED, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    spans = {
        row.split("|")[1].strip(): row.split("|")[-2].strip() for row in done.stdout.splitlines() if row[:1] == "|"
    }
    assert (spans["no telemetry"], spans["1 % sampled"], spans["100 % sampled"]) == ("0", "2", "200")
