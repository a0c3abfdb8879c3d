"""Run scenarios in simulated worlds: ``python -m tests.simulation --scenario ordered --seed 17``.

Without ``--seed`` and ``--seeds first:last``, ``--seeds 1000`` draws this many new seeds for each scenario. The trace
of the first failing seed of each scenario is printed, and a table at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from random import SystemRandom

from msgspec import Struct

from outboxio.testing.simulation.simulate import Simulation
from tests.simulation.scenarios import SCENARIOS

NEW_SEEDS = 10**9
LAST_STEPS = 400  # lines of a trace that are printed, unless --trace is given


def command(scenario: str, seed: int, *, faults: bool = True) -> str:
    """The command that repeats a seed."""
    return f"python -m tests.simulation --scenario {scenario} --seed {seed}{'' if faults else ' --faults none'}"


class Row(Struct):
    """A scenario in the table at the end."""

    scenario: str
    seeds: int = 0
    steps: int = 0
    virtual_seconds: float = 0.0
    cpu_seconds: float = 0.0
    failed: list[int] = []

    def __str__(self) -> str:
        seeds = max(1, self.seeds)
        return (
            f"{self.scenario:22}{self.seeds:8}{1000 * self.cpu_seconds / seeds:10.0f}{self.steps / seeds:10.0f}"
            f"{self.virtual_seconds / seeds:10.1f}{len(self.failed):8}  {' '.join(map(str, self.failed[:8]))}"
        )


TITLE = f"{'scenario':22}{'seeds':>8}{'ms/seed':>10}{'steps':>10}{'virtual s':>10}{'failed':>8}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="all scenarios by default")
    parser.add_argument("--seed", type=int, help="a single seed")
    parser.add_argument("--seeds", default="100", help="first:last, or a number of new seeds in all")
    parser.add_argument("--faults", choices=("usual", "none"), default="usual")
    parser.add_argument("--repeat", type=int, metavar="N", help="play each seed N times, and compare the traces")
    parser.add_argument("--trace", action="store_true", help="print the whole trace, also of a seed that is right")
    arguments = parser.parse_args()
    print(TITLE, file=sys.stderr)
    names = arguments.scenario or list(SCENARIOS)
    rows = [Row(name) for name in names]
    for row, seeds in zip(rows, _seeds(arguments, len(names)), strict=True):
        with SCENARIOS[row.scenario].simulation(faults=arguments.faults == "usual") as simulation:
            for seed in seeds:
                _play(simulation, row, seed, arguments)
        print(row, file=sys.stderr, flush=True)  # the progress
    print(TITLE, *rows, sep="\n")
    return int(any(row.failed for row in rows))


def _seeds(arguments: argparse.Namespace, scenarios: int) -> list[Sequence[int]]:
    """The seeds of each scenario."""
    if arguments.seed is not None:
        return [[arguments.seed]] * scenarios
    first, colon, last = arguments.seeds.partition(":")
    if colon:
        return [range(int(first), int(last))] * scenarios
    drawn = [SystemRandom().randrange(NEW_SEEDS) for _ in range(int(first))]
    return [drawn[number::scenarios] for number in range(scenarios)]


def _play(simulation: Simulation, row: Row, seed: int, arguments: argparse.Namespace) -> None:
    began = time.process_time()
    played = simulation.play(seed, record=arguments.trace)
    row.cpu_seconds += time.process_time() - began
    row.seeds += 1
    row.steps += played.steps
    row.virtual_seconds += played.seconds
    why = played.why
    if arguments.repeat:
        hashes = {simulation.play(seed, record=True).hash for _ in range(arguments.repeat)}
        print(f"{row.scenario} {seed}: {' '.join(sorted(hashes))}")
        if len(hashes) > 1:
            why = f"{len(hashes)} different traces in {arguments.repeat} repetitions"
    if arguments.trace:
        print("\n".join(played.trace))
    if why is None:
        return
    row.failed.append(seed)
    if len(row.failed) == 1 and not arguments.trace:
        again = simulation.play(seed, record=True)
        print("\n".join(again.trace[-LAST_STEPS:]))
        if again.error is not None:
            traceback.print_exception(again.error, file=sys.stdout)
    print(f"{row.scenario}: seed {seed}: {why}")
    print(f"repeat it: {command(row.scenario, seed, faults=arguments.faults == 'usual')}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
