"""``python -m tests.simulation.mutation``: in how many seeds does the simulation detect a broken guarantee?

The mutants are the patches of ``tests/chaos/mutants`` and of ``tests/simulation/mutants``. The header of a patch names
the scenario that shows the break: ``Simulation: fenced-ordered``. The patch is applied to a copy of the tree, and the
scenario runs there with one seed after the other until one fails. A seed that fails in the original tree as well
does not count.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.chaos import mutation as chaos
from tests.chaos.mutation import ROOT, DoesNotApply, copied
from tests.simulation.scenarios import SCENARIOS

MUTANTS = Path(__file__).parent / "mutants"
MOST_SEEDS = 300


class Mutant(Struct, frozen=True):
    """A deliberate break, and the scenario that shows it."""

    patch: Path
    what: str
    scenario: str

    @classmethod
    def read(cls, patch: Path) -> Mutant:
        header = patch.read_text().partition("diff --git")[0].strip().splitlines()
        fields = dict(line.split(":", 1) for line in header[1:] if ":" in line)
        return cls(patch, header[0], fields.get("Simulation", "").strip())


class Search(Struct, frozen=True):
    """The first seed that fails, and why; ``None`` if no seed does. With the CPU seconds of all seeds so far."""

    seed: int | None
    why: str
    cpu: float


def mutants() -> list[Mutant]:
    """All mutants that a scenario is named for."""
    patches = sorted([*chaos.MUTANTS.glob("*.patch"), *MUTANTS.glob("*.patch")], key=lambda patch: patch.name)
    return [mutant for mutant in map(Mutant.read, patches) if mutant.scenario]


def is_set_aside(mutant: Mutant) -> bool:
    """True for a third, drawn at random by name, which is held out while properties and scenarios are written."""
    return random.Random(mutant.patch.stem).random() < 1 / 3


def seeds_until_caught(mutant: Mutant, seeds: range = range(MOST_SEEDS)) -> Search:
    """Run the mutant's scenario in a broken copy of the tree. Raises :class:`DoesNotApply`."""
    cpu = 0.0
    with copied(mutant.patch) as tree:
        while True:
            found = _search_in(tree, mutant.scenario, seeds)
            cpu += found.cpu
            if found.seed is None or _search_in(ROOT, mutant.scenario, range(found.seed, found.seed + 1)).seed is None:
                return Search(found.seed, found.why, cpu)
            print(f"seed {found.seed} of {mutant.scenario} fails in the unbroken tree: {found.why}", file=sys.stderr)
            seeds = range(found.seed + 1, seeds.stop)


def search(name: str, seeds: range) -> Search:
    """Run a scenario until a seed fails."""
    began = time.process_time()
    with SCENARIOS[name].simulation() as simulation:
        for seed in seeds:
            why = simulation.play(seed).why
            if why is not None:
                return Search(seed, why, time.process_time() - began)
    return Search(None, "", time.process_time() - began)


def _search_in(tree: Path, scenario: str, seeds: range) -> Search:
    command = [sys.executable, "-m", __spec__.name, "--search", scenario, "--seeds", f"{seeds.start}-{seeds.stop}"]
    environ = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the simulation itself failed:\n{done.stdout}\n{done.stderr}")
    return msgspec.json.decode(done.stdout, type=Search)


def _rows(chosen: Sequence[Mutant], seeds: range) -> Iterator[tuple[str, bool]]:
    """The lines of the table, and whether the mutant was caught."""
    for mutant in chosen:
        try:
            found = seeds_until_caught(mutant, seeds)
        except DoesNotApply as why:
            yield f"| {mutant.patch.stem} | THE PATCH DOES NOT APPLY any more: {why} |", False
            continue
        seed = "not caught" if found.seed is None else str(found.seed)
        why = found.why.splitlines()[0][:120] if found.why else ""
        yield f"| {mutant.patch.stem} | {mutant.scenario} | {seed} | {found.cpu:.1f} | {why} |", found.seed is not None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutation", description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the mutants")
    parser.add_argument("--set-aside", choices=("yes", "no"), help="only the third that is set aside, or only the rest")
    parser.add_argument("--seeds", default=f"0-{MOST_SEEDS}", help="the first seed, and the one behind the last: 0-300")
    parser.add_argument("--search", help="run this scenario here, and print the first seed that fails")
    options = parser.parse_args(arguments)
    seeds = range(*map(int, options.seeds.split("-")))
    if options.search:
        sys.stdout.buffer.write(msgspec.json.encode(search(options.search, seeds)))
        return 0
    chosen = [mutant for mutant in mutants() if options.only in mutant.patch.stem]
    if options.set_aside:
        chosen = [mutant for mutant in chosen if is_set_aside(mutant) == (options.set_aside == "yes")]
    print("| mutant | scenario | first seed | CPU s | what fails |\n|---|---|---|---|---|", flush=True)
    caught = 0
    for row, is_caught in _rows(chosen, seeds):
        caught += is_caught
        print(row, flush=True)
    print(f"\n{caught} of {len(chosen)} caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
