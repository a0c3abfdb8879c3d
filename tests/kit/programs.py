"""Programs that single tests need besides servers.

A missing program skips the test, and the closing section of the run says so. A program that ``OUTBOXIO_TEST_REQUIRE``
names fails the test instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping

import pytest

PROGRAMS: Mapping[str, str] = {
    "chromium": "apt-get install --no-install-recommends chromium",
    "epmd": "apt-get install erlang-base",
    "git": "apt-get install git",
    "nats-server": "apt-get install --no-install-recommends nats-server",
    "openssl": "apt-get install openssl",
    "pgbouncer": "apt-get install pgbouncer",
    "promtool": "apt-get install --no-install-recommends prometheus",
    "rabbitmq-server": "apt-get install --no-install-recommends rabbitmq-server",
    "redis-server": "apt-get install redis-server",
}
"""By the names of the programs: how Debian installs them."""

#: Debian installs server programs in folders that are not on the PATH of most users.
_FURTHER_PLACES = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/usr/bin")


class Programs:
    """Finds programs, and remembers the missing programs for the closing section."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._missing: dict[str, str] = {}

    def need(self, name: str) -> str:
        """Return the path of a program. A missing program skips the test, or fails it if the program is required."""
        path = os.pathsep.join([self._environ.get("PATH", os.defpath), *_FURTHER_PLACES])
        if found := shutil.which(name, path=path):
            return found
        self._missing[name] = f"the program is missing: {PROGRAMS[name]}"
        if name in names_in(self._environ, "OUTBOXIO_TEST_REQUIRE"):
            pytest.fail(f"OUTBOXIO_TEST_REQUIRE names {name}, but {self._missing[name]}", pytrace=False)
        pytest.skip(f"{name}: {self._missing[name]}")

    def report(self) -> Iterator[str]:
        """A line for each program that a test needed and that is missing."""
        for name, reason in self._missing.items():
            yield f"{name}: NOT TESTED, {reason}"


def names_in(environ: Mapping[str, str], variable: str) -> frozenset[str]:
    """The names in a list with commas."""
    return frozenset(name.strip() for name in environ.get(variable, "").split(",") if name.strip())


#: The programs of this test session.
programs = Programs()
