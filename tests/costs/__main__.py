"""Count again and write ``costs.toml``: ``make costs REASON="..."``, which is ``python -m tests.costs --reason "..."``.

A reason is required if a figure rose by more than 1 %. Figures that differ by less stay as they are.
``--functions sqlite/event`` lists the calls of each function instead, to compare
two commits.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import outboxio
from tests.costs import figures
from tests.costs.databases import fresh_database, measured
from tests.costs.figures import ReasonMissing
from tests.costs.measure import COUNTED, Measurement, has_instructions
from tests.costs.scenarios import SCENARIOS
from tests.kit.background_loop import migrate, run_in_background


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.costs", description=__doc__.splitlines()[0])
    parser.add_argument("--reason", help="why the figures that rose are worth their price")
    parser.add_argument("--functions", metavar="DIALECT/SCENARIO", help="list the calls of each function instead")
    arguments = parser.parse_args()
    if arguments.functions:
        return list_functions(*arguments.functions.split("/"))
    return count(arguments.reason)


def count(reason: str | None) -> int:
    """Count on each dialect, and write the figures that changed."""
    known, changes = figures.read(), list[figures.Change]()
    if not has_instructions():
        print("instructions are counted on CPython 3.11 only; their figures stay as they are")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        counted = dict(zip(COUNTED, processes.map(measured, COUNTED), strict=True))
    for dialect, costs in counted.items():
        if costs is None:
            print(f"{dialect} is not here; its figures stay as they are")
        else:
            changes += figures.compare(known, dialect, costs)
    for change in changes:
        print(change)
    try:
        figures.write(figures.updated(known, changes, reason))
    except ReasonMissing:
        print('Nothing is written. Say why the rise is worth its price: make costs REASON="..."', file=sys.stderr)
        return 1
    print(f"{len(changes)} figures changed" if changes else "all figures are as they were")
    return 0


def list_functions(dialect: str, name: str) -> int:
    """Print the calls of each function."""
    [scenario] = [each for each in SCENARIOS if each.name == name]
    with fresh_database(dialect) as url:
        assert url is not None, f"{dialect} is not here"
        run_in_background(migrate(url))
        folder = Path(outboxio.__file__).parent.parent
        for calls, code in Measurement(scenario, dialect, url).functions():
            if calls:
                file = Path(code.co_filename)
                shown = file.relative_to(folder) if file.is_relative_to(folder) else file.name
                print(f"{calls:10.3f}  {shown}: {code.co_qualname}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
