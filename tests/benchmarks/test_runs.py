"""The benchmarks still run: a scenario of each kind, with a few hundred events, on the embedded database."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.results import Results

SCENARIOS = ("fanout", "execute", "sustained", "neighbour", "backlog")
PROJECT = Path(__file__).parents[2]


UNRESTRICTED = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOXIO_TEST_")}


def test_what_is_asked_for_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    command = [sys.executable, "-m", "benchmarks", "--size", "tiny", "--only", "sqlite", "--rounds", "1", "--no-peers"]
    command += ["--scenario", ",".join(SCENARIOS), "--json", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env=UNRESTRICTED, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    results = msgspec.json.decode(kept.read_bytes(), type=Results)
    assert [run.error for run in results.failures()] == []
    assert {run.scenario for run in results.runs} == set(SCENARIOS)
    assert "Executing actions" in done.stdout


def test_the_price_of_traces_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.traces", "--only", "sqlite", "--events", "200", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env=UNRESTRICTED, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    spans = {
        row.split("|")[1].strip(): row.split("|")[-2].strip() for row in done.stdout.splitlines() if row[:1] == "|"
    }
    assert (spans["no telemetry"], spans["1 % sampled"], spans["100 % sampled"]) == ("0", "2", "200")
