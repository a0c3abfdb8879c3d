"""A database written by 0.1.0 is upgraded as the documentation describes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow.test_rolling_deploy import folder_with
from tests.kit.app import Look

pytestmark = pytest.mark.not_on("mysql", "mariadb", why="0.1.0 ran on PostgreSQL and SQLite")

ROOT = Path(__file__).parents[2]
RELEASE = "fc65151"
"""The commit of 0.1.0."""
PAGE = ROOT / "docs" / "how-to" / "upgrade-from-0.1.md"
COMMANDS = re.findall(r'^```sh title="typed by a test"\n(.*?)^```$', PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)

AN_HOUR_BEFORE = {"postgres": "{0} - interval '1 hour'", "sqlite": "datetime({0}, '-1 hour') || '.000000'"}


async def test_upgrade_keeps_the_rows_of_0_1_0_in_every_state(database_url: str, look: Look, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("upgrade_app.py"), tmp_path / "app.py")
    old = folder_with(RELEASE, tmp_path / "0.1.0")

    def run(code: Path, *command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(code), "DATABASE": database_url}
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(old, "app.py")
    assert set(await look.states()) == {"SUCCEEDED", "DEAD", "FAILED", "SKIPPED", "EXPIRED", "PENDING"}
    for table, column in (("subscriptions", "last_seen_date"), ("event_notifications", "next_retry_at")):
        before = AN_HOUR_BEFORE[look.dialect].format(column)
        await look.fetch(f"UPDATE {look.table(table)} SET {column} = {before}")

    typed = [line.removeprefix("outboxio ") for block in COMMANDS for line in block.splitlines()]
    assert len(typed) == 6
    printed = [run(ROOT, "-m", "outboxio.cli", *line.split()) for line in typed]

    assert "upgrade/0.1.0.sql" in printed[0]
    assert await look.states() == {"SUCCEEDED": 4, "PENDING": 1, "SKIPPED": 1, "EXPIRED": 1}
    assert "mail 2, attempt 2" in printed[3], "a failed notification continues with its attempts"
    assert "mail 5, attempt 1" in printed[3], "a pending notification is handled"
    assert "mail 6, attempt 1" in printed[3], "an event that 0.1.0 did not fan out is handled"
    assert "mail 1, attempt 1" in run(ROOT, "-m", "outboxio.cli", "worker", "app:outbox", "--drain")
