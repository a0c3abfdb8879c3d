"""``python -m tests.chaos``: runs chaos, prints the results, and how to repeat a failed run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from tests.chaos.checker import INVARIANTS
from tests.chaos.faults import FAULTS
from tests.chaos.run import Plan, Result, run
from tests.chaos.site import SCHEMES, Site, site
from tests.kit.servers import DIALECTS

WIDTH = 140  # in a file or a pipe, where the window cannot be made wider


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    logging.getLogger("asyncpg").setLevel(logging.ERROR)  # servers are stopped on purpose
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    results: list[Result] = []
    databases = list(SCHEMES) if options.database == "all" else options.database.split(",")
    for database in databases:
        try:
            with site(database) as here:
                for number in range(options.runs):
                    results.append(_run(here, _plan(options, number), keep=options.keep))
                    _show_violations(results[-1], console)
        except pytest.skip.Exception as reason:
            console.print(f"{database} is left out: {reason}")
    _show(results, console)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return int(any(result.violations for result in results) or not results)


def _plan(options: argparse.Namespace, number: int) -> Plan:
    return Plan(
        options.seed + number, options.seconds, options.faults, options.workers, quiet_within=options.quiet_within,
        older=options.older,
    )  # fmt: skip


def _run(here: Site, plan: Plan, *, keep: bool) -> Result:
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{here.database}-{plan.seed}-"))
    try:
        with DIALECTS[here.server.dialect].fresh_database(here.server, folder) as url:
            result = asyncio.run(run(here.place(url, folder), plan))
    except BaseException:
        print(f"The run itself failed. {_repeat(here.database, plan, folder)}", file=sys.stderr)
        raise
    result.database = here.database
    if not result.violations and not keep:
        shutil.rmtree(folder)
    return result


def _show_violations(result: Result, console: Console) -> None:
    if not result.violations:
        return
    plan = result.plan
    console.print(f"\n{result.database}, seed {plan.seed}: {len(result.violations)} violations", style="bold red")
    for number, some in Counter(violation.invariant for violation in result.violations).items():
        console.print(f"{number}. {INVARIANTS[number]}: {some} times not", style="red")
        for violation in [v for v in result.violations if v.invariant == number][:5]:
            console.print(f"   {violation.what}", markup=False)
    console.print(f"{_repeat(result.database, plan, result.folder)}\n", markup=False, soft_wrap=True)


def _repeat(database: str, plan: Plan, folder: str | Path) -> str:
    faults = "" if plan.faults == tuple(FAULTS) else f" --faults '{','.join(plan.faults)}'"
    return (
        f"Repeat it: python -m tests.chaos --database {database} --seed {plan.seed} --seconds {plan.seconds:g}"
        f" --workers {plan.workers}{faults}{' --older' * plan.older}\nThe histories: {folder}"
    )


def _show(results: Sequence[Result], console: Console) -> None:
    if not results:
        return
    databases = list(dict.fromkeys(result.database for result in results))
    table = Table(title=f"{len(results)} runs")
    table.add_column("")
    for database in databases:
        table.add_column(database, justify="right")
    sums = {d: Counter[str]() for d in databases}
    faults = {d: Counter[str]() for d in databases}
    for result in results:
        sums[result.database].update({"runs": 1, **result.counts, "violations": len(result.violations)})
        faults[result.database].update(result.faults)
    for what in dict.fromkeys(key for some in sums.values() for key in some):
        table.add_row(what, *(f"{sums[database][what]:,}" for database in databases))
    table.add_section()
    for name in FAULTS:
        if any(faults[database][name] for database in databases):
            table.add_row(name, *(f"{faults[database][name]:,}" for database in databases))
    console.print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="runs on each database")
    parser.add_argument("--seconds", type=float, default=20, help="how long faults befall each run")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="of the first run; the next has the next"
    )
    parser.add_argument("--database", default="postgres", help=f"{', '.join(SCHEMES)}, several with commas, or all")
    parser.add_argument("--faults", type=_faults, default=tuple(FAULTS), help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--workers", type=int, default=2, help="instances with all handlers")
    parser.add_argument("--older", action="store_true", help="begin beside a process without partitions (PostgreSQL)")
    parser.add_argument("--quiet-within", type=float, default=120, help="seconds in which all must be done afterwards")
    parser.add_argument("--keep", action="store_true", help="keep the histories of runs in which all went well, too")
    parser.add_argument("--json", type=Path, help="where to write everything that was counted")
    return parser.parse_args(arguments)


def _faults(names: str) -> tuple[str, ...]:
    chosen = tuple(name for name in names.split(",") if name)
    if unknown := set(chosen) - set(FAULTS):
        raise argparse.ArgumentTypeError(f"no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
