"""promtool, the checker of Prometheus, from Debian's package ``prometheus``."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.kit.programs import programs


def check(*arguments: str, given: bytes = b"") -> None:
    """``promtool check``."""
    _run("check", *arguments, given=given)


def check_rules(path: Path) -> None:
    """Check a file of rules."""
    check("rules", str(path))


def test_rules(*paths: Path) -> None:
    """Run files of tests of rules."""
    _run("test", "rules", *map(str, paths))


test_rules.__test__ = False  # type: ignore[attr-defined]  # pytest must not collect this function


def _run(*arguments: str, given: bytes = b"") -> None:
    """Fail with the output of promtool if it reports an error."""
    done = subprocess.run([programs.need("promtool"), *arguments], input=given, capture_output=True)
    # A hint about a name has exit code 3.
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
