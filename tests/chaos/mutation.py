"""``python -m tests.chaos.mutation``: checks that a chaos run detects a broken guarantee.

Each patch in ``mutants/`` breaks a guarantee deliberately; its header names the invariant, and the faults that reveal
it. The patch is applied to a copy of the tree, and chaos runs there must find that invariant violated; in an unchanged
copy the same runs must find no violation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.chaos.checker import INVARIANTS
from tests.chaos.run import Result

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).parent / "mutants"
COPIED = ("outboxio", "sql", "tests")
TRIES = 4  # seeds that a mutant may survive before it counts as undetected


class Stage(Struct, frozen=True):
    """Where, how long and under which faults a mutant shows."""

    database: str
    seconds: str
    faults: str
    options: str = ""
    """Further options of ``python -m tests.chaos``."""


class Mutant(Struct, frozen=True):
    """A deliberate break."""

    patch: Path
    what: str
    invariant: int
    stage: Stage

    @classmethod
    def read(cls, patch: Path) -> Mutant:
        header = patch.read_text().partition("diff --git")[0].strip().splitlines()
        header_fields = dict(line.split(":", 1) for line in header[1:] if ":" in line)
        stage = Stage(*(header_fields.get(name, "").strip() for name in ("Database", "Seconds", "Faults", "Options")))
        return cls(patch, header[0], int(header_fields["Invariant"]), stage)


class DoesNotApply(Exception):
    """The code that a mutant breaks has changed."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    mutants = [Mutant.read(patch) for patch in sorted(MUTANTS.glob("*.patch")) if options.only in patch.stem]
    bad = 0
    for stage in dict.fromkeys(mutant.stage for mutant in mutants if not options.no_control):
        found = _found_in_unbroken(stage, options.seed)
        bad += bool(found)
        where = f"{stage.database}, {stage.faults or 'no faults'} {stage.options}".rstrip()
        print(f"unbroken, {where}: {f'finds {found} broken' if found else 'finds nothing'}", flush=True)
    for mutant in mutants:
        result, is_caught = _check(mutant, options.seed)
        bad += not is_caught
        print(f"{mutant.patch.stem}: {result}", flush=True)
    print(f"{len(mutants)} mutants, {bad} runs did not have the expected result")
    return int(bad > 0 or not mutants)


def _check(mutant: Mutant, seed: int) -> tuple[str, bool]:
    """The result of a mutant, and True if it is as expected."""
    try:
        with copied(mutant.patch) as tree:
            for number in range(TRIES):
                found = _broken(tree, mutant.stage, seed + number)
                if mutant.invariant in found:
                    return f"caught, with seed {seed + number}: {INVARIANTS[mutant.invariant]}", True
    except DoesNotApply as why:
        return f"THE PATCH DOES NOT APPLY any more; rewrite it for the current code\n{why}", False
    return f"NOT CAUGHT in {TRIES} runs, whose last found {sorted(found) or 'nothing'}: {mutant.what}", False


def _found_in_unbroken(stage: Stage, seed: int) -> list[int]:
    with copied(None) as tree:
        return sorted(_broken(tree, stage, seed))


def _broken(tree: Path, stage: Stage, seed: int) -> set[int]:
    """The invariants that a run in a tree finds violated."""
    figures = tree / "figures.json"
    figures.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.chaos", "--database", stage.database, "--seconds", stage.seconds]
    command += [
        *stage.options.split(),
        "--faults",
        stage.faults,
        "--seed",
        str(seed),
        "--quiet-within",
        "45",
        "--json",
        str(figures),
    ]
    # Histories of mutants are not needed afterwards, so they are written below the tree.
    environ = os.environ | {"TMPDIR": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
    if not figures.exists():
        raise SystemExit(f"the run itself failed:\n{done.stdout}\n{done.stderr}")
    [result] = msgspec.json.decode(figures.read_bytes(), type=list[Result])
    return {violation.invariant for violation in result.violations}


@contextmanager
def copied(patch: Path | None) -> Iterator[Path]:
    """A copy of the files that a run needs, broken by a patch."""
    with tempfile.TemporaryDirectory(prefix="outboxio-mutant-") as folder:
        tree = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        if patch is not None:
            applied = subprocess.run(["git", "apply", str(patch)], cwd=tree, capture_output=True, text=True)
            if applied.returncode:
                raise DoesNotApply(applied.stderr.strip())
        tree.chmod(0o755)
        yield tree


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.mutation", description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the patches to try")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-control", action="store_true", help="leave out the runs in an unbroken tree")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
