"""Interleaved rounds: in each round every contestant runs once in every setting, in a new random order.

A disturbance of the machine (a noisy neighbour, a hot processor) thus affects all contestants alike. Each run has a
fresh process and an empty database.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.contestants import Contestant
from benchmarks.databases import Database, empty
from benchmarks.peers import PEERS
from benchmarks.results import Run
from benchmarks.scenarios import Scenario, Setting
from benchmarks.task import Figures, Task
from tests.kit.servers import Server

TAKES_AT_MOST = {"full": 300.0, "quick": 180.0, "tiny": 90.0}  # seconds per run
START_TAKES, PEER_TAKES = 3.0, 9.0  # seconds per run
ROWS_PER_SECOND = {"postgres": 13_000, "mysql": 7_000, "mariadb": 9_000, "sqlite": 15_000}  # written and handled
PROJECT = Path(__file__).parent.parent

_FEWER = {peer.contestant: peer.events for peer in PEERS if peer.events}


class Contest(Struct, frozen=True):
    """A contestant in a setting."""

    scenario: Scenario
    setting: Setting
    contestant: Contestant

    @property
    def label(self) -> str:
        return f"{self.scenario.name}, {self.setting.name}: {self.contestant.label}"

    def options(self, size: str) -> dict[str, Any]:
        options = self.setting.options(size)
        if fewer := _FEWER.get(self.contestant.name):
            options["events"] = fewer[size]
        return options

    def seconds(self, dialect: str, size: str) -> float:
        """Estimate how long a run takes, including the start of the process and the creation of its rows."""
        options = self.options(size)
        if self.contestant.kind == "peer":
            return PEER_TAKES
        rows = options.get("events", 0) * options.get("handlers", 1) + options.get("finished", 0)
        rows += options.get("warm_up", 0) + 5 * options.get("actions", 0)
        waits = options.get("seconds", 0) + options.get("pause", 0) * options.get("events", 0)
        return START_TAKES + options.get("processes", 0) / 2 + waits + rows / ROWS_PER_SECOND[dialect]


def contests(dialect: str, scenarios: Sequence[Scenario], contestants: Sequence[Contestant]) -> list[Contest]:
    """Return everything to run on a database of this dialect."""
    return [
        Contest(scenario, setting, contestant)
        for scenario in scenarios
        if dialect in scenario.dialects
        for setting in scenario.settings
        if dialect in setting.dialects
        for contestant in contestants
        if dialect in contestant.dialects and not contestant.why_not and contestant.takes_part(scenario, setting)
    ]


def schedule(contests: Sequence[Contest], size: str, rounds: int | None, seed: int) -> list[tuple[int, Contest]]:
    """Return the contests of all rounds, shuffled within each round."""
    random, planned = Random(seed), list[tuple[int, Contest]]()
    most = max((rounds or contest.scenario.rounds[size] for contest in contests), default=0)
    for number in range(1, most + 1):
        of_round = [c for c in contests if number <= (rounds or c.scenario.rounds[size])]
        random.shuffle(of_round)
        planned += [(number, contest) for contest in of_round]
    return planned


def run(contest: Contest, number: int, server: Server, database: Database, size: str) -> Run:
    """Execute a single run. An error is stored as its result."""
    options = contest.options(size)
    base = Run(
        database.id, contest.scenario.name, contest.setting.name, contest.contestant.name, number, options
    )  # fmt: skip
    begun = time.monotonic()
    try:
        with empty(server) as url:
            task = Task(contest.scenario.name, contest.contestant.name, database.dialect, url, options)
            figures = _figures(contest.contestant.command(task), TAKES_AT_MOST[size])
    except _Failed as error:
        return msgspec.structs.replace(base, error=str(error), took=time.monotonic() - begun)
    return msgspec.structs.replace(base, figures=figures, took=time.monotonic() - begun)


class _Failed(Exception):
    pass


def _figures(command: Sequence[str], longest: float) -> Figures:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
        start_new_session=True,  # so that child processes end with the run
    )
    try:
        output, errors = process.communicate(timeout=longest)
    except subprocess.TimeoutExpired:
        raise _Failed(f"did not finish within {longest:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        lines = [line.strip(" |+-") for line in errors.strip().splitlines()]
        raise _Failed(next((line for line in reversed(lines) if line), f"exit status {process.returncode}"))
    figures: Figures = msgspec.json.decode(output.strip().splitlines()[-1])
    return figures
