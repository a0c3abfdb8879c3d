"""Marks of tests whose rule does not concern every dialect."""

from __future__ import annotations

import pytest

from tests.kit.opened_by import BY_ENGINE, OVER_PSYCOPG

needs_own_pool = pytest.mark.skipif(BY_ENGINE, reason="about the pool of outboxio: an engine has its own")
needs_asyncpg = pytest.mark.skipif(OVER_PSYCOPG, reason="about asyncpg: its messages, its errors or its connections")
needs_many_writers = pytest.mark.not_on("sqlite", why="a file has one writer at a time")
needs_partitions = pytest.mark.not_on("sqlite", why="a handler has a single partition on SQLite")
