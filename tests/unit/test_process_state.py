"""No test changes the state of the process for the next test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.sources import ROOT

CHANGES = {
    "logger 'shop': absent before, (10,": "logging.getLogger('shop').setLevel(10)",
    "logger 'root'": "logging.getLogger().addHandler(logging.StreamHandler())",
    "logger 'logging.disable'": "logging.disable(50)",
    "environment variable 'SHOP': absent before, 'open' after": "os.environ['SHOP'] = 'open'",
    "environment variable 'HOME'": "del os.environ['HOME']",
    "handler of signal 'SIGUSR1'": "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "interpreter 'event loop policy'": "asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())",
    "interpreter 'working directory'": "os.chdir('/')",
    "interpreter 'locale'": "locale.setlocale(locale.LC_NUMERIC, 'C.UTF-8')",
    "interpreter 'warning filters'": "warnings.simplefilter('ignore')",
    "interpreter 'import path'": "sys.path.append('/nowhere')",
    "telemetry of the process": "telemetry.protocol.use_in_process(telemetry.Telemetry())",
}


@pytest.mark.slow
def test_a_leaked_change_fails_only_the_test_that_made_it(tmp_path: Path) -> None:
    tests = [
        "import asyncio, locale, logging, os, signal, sys, warnings",
        "from outboxio import telemetry",
        *(f"def test_{number}():\n    {change}" for number, change in enumerate(CHANGES.values())),
        "def test_last():\n    pass",
    ]
    (tmp_path / "test_changes.py").write_text("\n\n".join(tests), "utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.kit.process_state",
        "-p",
        "no:cacheprovider",
        "test_changes.py",
    ]

    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": "/"}, capture_output=True, text=True
    )

    assert f"{len(CHANGES) + 1} passed, {len(CHANGES)} errors" in done.stdout, done.stdout
    assert [message for message in CHANGES if message not in done.stdout] == []
