"""A deployment replaces the processes of the previous version one by one, under load.

The previous version is the code before partitions, from the history of this repository. The tests are skipped without
git, and in a checkout without the history: an unpacked archive, or a shallow clone. In a full checkout the commit must
exist.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outboxio import Outbox
from outboxio.storage.schema import sql_files
from tests.kit.app import Look, eventually
from tests.kit.programs import programs

pytestmark = pytest.mark.one_of_family

ROOT = Path(__file__).parents[2]
PREVIOUS = "ee733e2"
"""The commit before the tables had partitions."""
BEFORE_OPERATING = "9e2ceab"
"""The commit before the tables for operators."""
PROCESSES = 4
PARTITIONS = 8
HANDLERS = ("plain", "ordered")


def later(look: Look, version: int) -> list[str]:
    """The files from a version on, without the contract file."""
    return [file.name for file in sql_files(look.dialect) if file.version >= version and not file.is_contract]


def folder_with(commit: str, folder: Path) -> Path:
    with tarfile.open(fileobj=BytesIO(code_of(commit, ROOT))) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of the version before partitions."""
    return folder_with(PREVIOUS, tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="module")
def before_operating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of the version before the operator tables."""
    return folder_with(BEFORE_OPERATING, tmp_path_factory.mktemp("before_operating"))


def code_of(commit: str, checkout: Path) -> bytes:
    """The code of a commit as a tar file. Fails if the full history is present and lacks the commit."""
    programs.need("git")
    if not (checkout / ".git").exists():
        pytest.skip(f"{checkout} is not a git checkout, so there is no code of commit {commit}")
    archive = git("archive", commit, "outboxio", "sql", checkout=checkout)
    if archive.returncode:
        said = archive.stderr.decode().strip()
        if git("rev-parse", "--is-shallow-repository", checkout=checkout).stdout.strip() == b"true":
            pytest.skip(f"this is a shallow clone, which lacks commit {commit} ({said}): run git fetch --unshallow")
        pytest.fail(f"the whole history of {checkout} lacks commit {commit} ({said}): update PREVIOUS", pytrace=False)
    return archive.stdout


def git(*words: str, checkout: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=checkout, capture_output=True, check=False)


class Fleet:
    """The processes of a deployment, and everything they have reported."""

    def __init__(self, database: str, folder: Path) -> None:
        self._database = database
        self._folder = folder
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, code: Path, *, migrates: bool = False, **options: Any) -> None:
        process = await self.begin(name, code, migrates=migrates, **options)
        await eventually(lambda: process.returncode is not None or self.of(name, "running"))
        [running] = self.of(name, "running")
        assert running["version"] == str(code)

    async def begin(
        self, name: str, code: Path, *, migrates: bool = False, stderr: int | None = None, **options: Any
    ) -> asyncio.subprocess.Process:
        config = {"database": self._database, "name": name, "migrates": migrates, "options": options}
        with (self._folder / name).open("wb") as reports:
            self._running[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.flow.rolling_worker", json.dumps(config)),
                cwd=code,  # which comes first on the path, so that the process imports this version
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=reports,
                stderr=stderr,
            )
        return self._running[name]

    async def stop(self, name: str) -> None:
        """Stop a process as a deployment does. It leaves cleanly."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert self.of(name, "left")

    def forget(self, name: str) -> None:
        """A process that ended by itself."""
        del self._running[name]

    async def quiet(self) -> None:
        """No process emits an event any more."""
        for process in self._running.values():
            process.send_signal(signal.SIGUSR1)
        await eventually(lambda: all(self.of(name, "quiet") for name in self._running))

    def kill(self) -> None:
        for process in self._running.values():
            if process.returncode is None:
                process.kill()

    def of(self, name: str, what: str) -> list[dict[str, Any]]:
        lines = (self._folder / name).read_text("utf-8").splitlines(keepends=True)
        reports = [json.loads(line) for line in lines if line.endswith("\n")]
        return [report for report in reports if report["what"] == what]

    def all(self, what: str) -> list[dict[str, Any]]:
        return [report for file in self._folder.iterdir() for report in self.of(file.name, what)]


@pytest.fixture
async def fleet(server_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(server_url, tmp_path)
    try:
        yield fleet
    finally:
        fleet.kill()


@pytest.mark.real_time("versions run side by side under load for seconds")
async def test_a_rolling_deploy_under_load_loses_and_repeats_nothing(
    server_url: str, fleet: Fleet, previous: Path
) -> None:
    look = Look(server_url)
    for number in range(PROCESSES):
        await fleet.start(f"old{number}", previous, migrates=number == 0)
    await asyncio.sleep(1)

    async with Outbox(server_url, namespace="app") as outbox:
        began = time.monotonic_ns()
        assert await outbox.migrate() == {"default": later(look, 5)}
        altered = Altered(began, time.monotonic_ns())
        await asyncio.sleep(1)
        for number in range(PROCESSES):
            await fleet.stop(f"old{number}")
            await fleet.start(f"new{number}", ROOT, partitions=PARTITIONS)
            await asyncio.sleep(0.5)
        assert await look.value("SELECT count(*) FROM {event_notifications} WHERE partition_number > 0") == 0

        # The time that a process waits for the next announcement of an older process, as if it had passed.
        await look.fetch("UPDATE {subscriptions} SET older_seen_date = '2020-01-01 00:00:00'")
        spread = "SELECT count(DISTINCT partition_number) FROM {event_notifications}"

        async def is_spread() -> bool:
            return bool(await look.value(spread) == PARTITIONS)

        await eventually(is_spread, timeout=30)
        assert await outbox.migrate(contract=True) == {"default": ["0006_partitions_contract.sql"]}
        await asyncio.sleep(2)
        await eventually(lambda: len(fleet.all("emitted")) > 100 * PROCESSES, timeout=60)
        await handled_all(fleet)
    for number in range(PROCESSES):
        await fleet.stop(f"new{number}")
    await assert_nothing_lost_or_repeated(fleet, look, altered)


async def test_operator_tables_are_added_beside_processes_without_them(
    server_url: str, fleet: Fleet, before_operating: Path
) -> None:
    look = Look(server_url)
    for number in range(2):
        await fleet.start(f"old{number}", before_operating, migrates=number == 0)
    await eventually(lambda: len(fleet.all("plain")) > 50, timeout=60)

    async with Outbox(server_url, namespace="app") as outbox:
        others = [Outbox(server_url, namespace="app") for _ in range(2)]
        began = time.monotonic_ns()
        applied = await asyncio.gather(*(each.migrate() for each in (outbox, *others)))
        altered = Altered(began, time.monotonic_ns())
        for other in others:
            await other.close()
        assert sorted(each["default"] for each in applied) == [[], [], later(look, 7)]
        handled = len(fleet.all("plain"))
        await eventually(lambda: len(fleet.all("plain")) > handled + 50, timeout=60)

        await fleet.stop("old0")
        await assert_refused(await fleet.begin("again", before_operating, stderr=asyncio.subprocess.PIPE))
        fleet.forget("again")
        await fleet.start("new0", ROOT)
        await eventually(lambda: len(fleet.of("new0", "emitted")) > 50, timeout=60)
        await fleet.stop("old1")
        await fleet.start("new1", ROOT)
        await handled_all(fleet)
        await outbox.check()
    for number in range(2):
        await fleet.stop(f"new{number}")
    await assert_nothing_lost_or_repeated(fleet, look, altered)


async def handled_all(fleet: Fleet) -> None:
    await fleet.quiet()

    async def is_done() -> bool:
        emitted = len(fleet.all("emitted"))
        return all(len(fleet.all(handler)) >= emitted for handler in HANDLERS)

    await eventually(is_done, timeout=60)


class Altered(NamedTuple):
    """When the migration changed the tables."""

    began: int
    ended: int

    def has(self, report: dict[str, Any]) -> bool:
        return bool(self.began <= report["at"] <= self.ended + 2 * 10**9)


async def assert_nothing_lost_or_repeated(fleet: Fleet, look: Look, altered: Altered) -> None:
    """On MySQL and MariaDB, an ALTER TABLE of ``events`` may end a transaction of a fan-out as a deadlock. The fan-out
    is tried again, and runs that began before its COMMIT are repeated (decision 16). Keys in order are not affected.
    """
    emitted = Counter((report["key"], report["number"]) for report in fleet.all("emitted"))
    in_time = look.driver != "asyncpg"
    for handler in HANDLERS:
        reports = fleet.all(handler)
        handled = Counter((report["key"], report["number"]) for report in reports)
        assert emitted - handled == Counter(), f"{handler}: lost"
        during = {(report["key"], report["number"]) for report in reports if in_time and altered.has(report)}
        assert (handled - emitted).keys() <= (during if handler == "plain" else set()), f"{handler}: handled twice"
    assert_in_order(fleet.all("ordered"))
    for report in fleet.all("log"):
        is_deadlock = in_time and altered.has(report) and "Deadlock" in report["message"]
        assert report["level"] == "WARNING" or is_deadlock, report
    assert await look.states() == {"SUCCEEDED": len(HANDLERS) * len(emitted)}


async def test_the_previous_version_does_not_start_beside_the_new_tables(
    server_url: str, fleet: Fleet, previous: Path
) -> None:
    async with Outbox(server_url, namespace="app") as outbox:
        await outbox.migrate()
    await assert_refused(await fleet.begin("old", previous, stderr=asyncio.subprocess.PIPE))
    assert not fleet.of("old", "running")


async def assert_refused(process: asyncio.subprocess.Process) -> None:
    _, said = await process.communicate()
    assert process.returncode != 0
    assert b"SchemaNewer" in said


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with two commits, the second of which has a file ``outboxio/new.py``."""
    programs.need("git")
    checkout = tmp_path / "whole"
    for folder in ("outboxio", "sql"):
        (checkout / folder).mkdir(parents=True)
        (checkout / folder / "old.py").touch()
    who = ("-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")
    git("init", "-q", checkout=checkout)
    for message in ("first", "second"):
        git("add", ".", checkout=checkout)
        assert not git(*who, "commit", "-q", "-m", message, checkout=checkout).returncode
        (checkout / "outboxio" / "new.py").touch()
    return checkout


def test_a_full_history_must_contain_the_previous_version(repository: Path) -> None:
    with tarfile.open(fileobj=BytesIO(code_of("HEAD~1", repository))) as tar:
        assert {"outboxio/old.py", "sql/old.py"} <= set(tar.getnames())
        assert "outboxio/new.py" not in tar.getnames()
    with pytest.raises(pytest.fail.Exception, match=r"whole history .* lacks commit fabcab5 .*: update PREVIOUS"):
        code_of("fabcab5", repository)


def test_without_the_history_the_previous_version_is_unavailable(repository: Path, tmp_path: Path) -> None:
    shallow, unpacked = tmp_path / "shallow", tmp_path / "unpacked"
    cloned = git("clone", "-q", "--depth", "1", repository.as_uri(), str(shallow), checkout=tmp_path)
    assert not cloned.returncode, cloned.stderr
    with pytest.raises(pytest.skip.Exception, match=r"shallow clone, which lacks commit fabcab5 .*--unshallow"):
        code_of("fabcab5", shallow)
    unpacked.mkdir()
    with pytest.raises(pytest.skip.Exception, match="is not a git checkout"):
        code_of("fabcab5", unpacked)


def assert_in_order(runs: list[dict[str, Any]]) -> None:
    """The runs of a key are in order, and none starts before the end of the previous one."""
    by_key = defaultdict[str, list[dict[str, Any]]](list)
    for run in sorted(runs, key=lambda run: run["began"]):
        by_key[run["key"]].append(run)
    for key, of_key in by_key.items():
        assert [run["number"] for run in of_key] == list(range(1, len(of_key) + 1)), key
        for former, later in pairwise(of_key):
            assert former["at"] <= later["began"], f"{key}: two runs at once"
