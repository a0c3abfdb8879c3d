"""promtool, the checker of Prometheus, from Debian's package ``prometheus``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROMTOOL = shutil.which("promtool")


def check(*arguments: str, given: bytes = b"") -> None:
    """Fail with promtool's words unless promtool accepts. Skips without promtool, unless a server is required."""
    if PROMTOOL is None:
        if os.environ.get("OUTBOXIO_TEST_REQUIRE"):
            pytest.fail("promtool is missing: apt-get install --no-install-recommends prometheus")
        pytest.skip("promtool is missing: apt-get install --no-install-recommends prometheus")
    done = subprocess.run([PROMTOOL, "check", *arguments], input=given, capture_output=True)
    # A hint about a name is an exit of 3.
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def check_rules(path: Path) -> None:
    """Check a file of alert rules."""
    check("rules", str(path))
