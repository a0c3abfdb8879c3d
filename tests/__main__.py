"""Run all tests, in parts at the same time: ``python -m tests``, which is ``make test``.

Tests wait for databases more than they compute, so the parts overlap. Each is a pytest process with its own servers.
``--seed 7`` runs the tests of each part in a random order, which the seed repeats. ``--quick`` runs the fast ones.
The output of a part that fails is printed. The last lines name the tests that failed, and have the sum of all parts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Seconds after which a part is ended. A single test that hangs is ended by pytest (tests/conftest.py).
LONGEST = 3600.0
#: Seconds between two lines of progress.
PROGRESS = 60.0


@dataclass(frozen=True)
class Part:
    """A run of pytest."""

    name: str
    #: One dialect, or several with commas.
    dialect: str
    arguments: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


WRITING = ("executor", "transaction", "delivery", "inbox")
#: What an application does with an engine. ``test_engines_over_asyncmy.py`` has the differences of both servers.
ON_ENGINES = ("sqlalchemy_session", "transaction", "record")


def by_engine(dialect: str, opened_by: str = "engine", names: Sequence[str] = WRITING) -> Part:
    """Run writing, delivery and inbox again, with outboxes opened by a SQLAlchemy engine."""
    files = [f"tests/contract/test_{name}.py" for name in names]
    return Part(f"{dialect} by {opened_by}", dialect, files, {"OUTBOXIO_TEST_OPENED_BY": opened_by})


def over_psycopg() -> Part:
    """Repeat tests that depend on the driver over psycopg. ``OUTBOXIO_TEST_DRIVER=psycopg`` runs all tests over it."""
    names = ("executor", "record", "sqlalchemy_session", "bound_sessions")
    files = [f"tests/contract/test_{name}.py" for name in names]
    return Part("postgres over psycopg", "postgres", ["-m", "database", *files], {"OUTBOXIO_TEST_DRIVER": "psycopg"})


def ignored(*folders: str) -> list[str]:
    return [f"--ignore=tests/{folder}" for folder in folders]


#: Folders of tests that run on SQLite without servers; what starts processes there has the mark ``slow``.
RULES = ("unit", "properties", "contract")
#: Folders without tests on a database, so that the parts of the dialects need not collect them. ``tests/conftest.py``
#: refuses such a test.
WITHOUT_DATABASES = ("unit", "simulation", "browser", "benchmarks")
#: A folder of tests that are all in one part, because each start of RabbitMQ costs 5 s of computing time.
BROKERS = "brokers"


def on_database(name: str, dialect: str, *elsewhere: str) -> Part:
    """The tests with a database, without those of these folders, which are in other parts."""
    return Part(name, dialect, ["-m", "database", *ignored(*WITHOUT_DATABASES, BROKERS, *elsewhere)])


#: Before Python 3.11.8, ``ast.parse`` may fail with a SystemError while another thread parses (CPython issue 106905).
#: For its own tracebacks pytest parses each file, such as the 24,000 lines of Playwright's, while an outbox in another
#: thread formats the tracebacks of handlers; the error ends pytest.
WITHOUT_PARSING = "--tb=native"

#: The longest come first, so that all end at about the same time. MySQL has no part by engine, because its driver and
#: its engine are those of MariaDB.
PARTS = [
    Part("postgres contract", "postgres", ["-m", "database", "tests/contract"]),
    on_database("sqlite", "sqlite"),
    on_database("mariadb", "mariadb"),
    Part(
        "programs and pages", "sqlite", [WITHOUT_PARSING, "-m", "not database", *ignored("simulation", BROKERS, *RULES)]
    ),
    on_database("postgres others", "postgres", "contract"),
    on_database("mysql", "mysql"),
    Part("brokers", "sqlite,postgres,mariadb,mysql", ["tests/brokers"]),
    Part("simulation", "sqlite", ["-m", "not database", "tests/simulation"]),
    Part("rules", "sqlite", ["-m", "not database", *(f"tests/{folder}" for folder in RULES)]),
    by_engine("postgres"),
    by_engine("mariadb"),
    by_engine("mariadb", "asyncmy", ON_ENGINES),
    by_engine("sqlite"),
    over_psycopg(),
]
#: Parts that run at the same time, for each core.
AT_ONCE = 2


def quick(number: int) -> list[Part]:
    """The tests for the inner loop, without servers and processes and without what has the mark ``slow``, on SQLite."""
    files = sorted(
        str(file.relative_to(ROOT)) for folder in RULES for file in (ROOT / "tests" / folder).glob("test_*.py")
    )
    return [
        Part(f"quick {part + 1} of {number}", "sqlite", ["-m", "not slow", *files[part::number]])
        for part in range(number)
    ]


_SUMMARY = re.compile(r"^(?:\d+ [a-z]+(?:, )?)+ in [\d.]+s.*$", re.MULTILINE)
_COUNTED = re.compile(r"(\d+) (passed|failed|error|skipped)")
_FOUND = re.compile(r"^=+ databases, brokers and programs =+\n((?:[^=\n].*\n)*)", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) .*$", re.MULTILINE)
#: Printed lines of a part that broke off and so has no list of failed tests.
LAST_LINES = 12
_PERCENT = re.compile(r"\[ *(\d+%)\]")


@dataclass(frozen=True)
class Result:
    """The exit code and the output of a part."""

    code: int
    output: str

    @property
    def has_passed(self) -> bool:
        return self.code in (0, 5)  # 5: no test was selected

    @property
    def summary(self) -> str:
        return next(iter(_SUMMARY.findall(self.output)[-1:]), f"no summary, exit code {self.code}")

    @property
    def counts(self) -> Counter[str]:
        """The tests by result. A run that broke off has an error."""
        found = Counter({result: int(number) for number, result in _COUNTED.findall(self.summary)})
        if not self.has_passed and not found["failed"] + found["error"]:
            found["error"] = 1
        return found

    @property
    def failures(self) -> list[str]:
        """The failed tests, a line each; of a part that broke off, its last lines."""
        if self.has_passed:
            return []
        listed = self.output.rpartition(" short test summary info ")[2]
        return _FAILED.findall(listed) or [f"exit code {self.code}", *self.output.splitlines()[-LAST_LINES:]]

    @property
    def found(self) -> set[str]:
        """The databases, brokers and programs that the tests used or missed, a line each."""
        return {line for lines in _FOUND.findall(self.output) for line in lines.splitlines() if ": " in line}


def run(part: Part, options: Sequence[str], log: Path) -> Result:
    environ = {**os.environ, "OUTBOXIO_TEST_ONLY": part.dialect, "OUTBOXIO_TEST_IN_PARTS": "1", **part.environ}
    if environ.pop("PYTHONDONTWRITEBYTECODE", None):  # it costs each part 10 s, and each of hundreds of processes 0.3 s
        environ["PYTHONPYCACHEPREFIX"] = str(ROOT / "build" / "bytecode")
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "--durations=10", "--color=no", *options, *part.arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()  # its servers end with it
            code = process.wait()
    return Result(code, log.read_text("utf-8", errors="replace"))


class Reports:
    """Runs parts, and prints the results as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = time.monotonic()
        self.results: list[Result] = []
        self._failures: list[str] = []

    def run(self, part: Part, options: Sequence[str]) -> None:
        result = run(part, options, self._folder / part.name)
        self.results.append(result)
        self._failures += [f"{part.name}: {line}" for line in result.failures]
        output = "" if result.has_passed else f"\n{result.output}\n"
        print(f"{output}{self._time()}  {part.name}: {result.summary}", flush=True)

    def progress(self) -> None:
        """A line with the parts that are running."""
        logs = sorted(self._folder.iterdir())
        at = {
            log.name: found[-1] for log in logs if (found := _PERCENT.findall(log.read_text("utf-8", errors="replace")))
        }
        print(f"{self._time()}  {', '.join(f'{name} {percent}' for name, percent in at.items())}", flush=True)

    def close(self) -> bool:
        """Print the sums; True if all parts have passed."""
        counts = sum((result.counts for result in self.results), Counter[str]())
        print("\n".join(sorted(set().union(*(result.found for result in self.results)))))
        print("".join(f"{line}\n" for line in self._failures), end="")
        failed = counts["failed"] + counts["error"]
        print(f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped in {self._time()}")
        return not failed and all(result.has_passed for result in self.results)

    def _time(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._started), 60)
        return f"{minutes:2}:{seconds:02}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests", description="Run all tests, in parts at the same time.")
    parser.add_argument("--seed", type=int, help="run the tests of each part in the random order of this seed")
    parser.add_argument("--quick", action="store_true", help="run the fast tests alone, on SQLite, in a minute")
    arguments = parser.parse_args()
    options = [] if arguments.seed is None else ["--random-order", f"--random-order-seed={arguments.seed}"]
    cores = os.cpu_count() or 1
    parts = quick(AT_ONCE * cores) if arguments.quick else PARTS
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE * cores) as threads:
        reports = Reports(Path(name))
        running = {threads.submit(reports.run, part, options) for part in parts}
        while running:
            ended, running = wait(running, PROGRESS)
            for part in ended:
                part.result()
            if running:
                reports.progress()
    return 0 if reports.close() else 1


if __name__ == "__main__":
    sys.exit(main())
