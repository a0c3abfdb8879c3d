"""The ports of servers and proxies of tests, which start listening some time after their port is chosen."""

from __future__ import annotations

import subprocess
import sys

from tests.kit.ports import _first_outgoing, free_port
from tests.kit.sources import ROOT

OTHER = """
from tests.kit import ports
others = ports._candidates()
ports._candidates = lambda: iter([{taken}, *others])
print(ports.free_port())
"""


def test_no_outgoing_connection_gets_the_port() -> None:
    assert free_port() < _first_outgoing()


def test_no_other_process_reserves_the_port() -> None:
    port = free_port()
    program = [sys.executable, "-c", OTHER.format(taken=port)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) != port
