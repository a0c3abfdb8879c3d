"""Bringing SQLite's tables up to date, and checking them."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from outboxio.errors import SchemaMissing, SchemaOccupied
from outboxio.storage.schema import (
    Found,
    files_to_apply,
    missing_parts,
    refuse_incomplete,
    refuse_newer,
    sql_files,
)
from outboxio.storage.sqlite.connection import Connections, fetch_value

PREFIX = "eventlog_"

COLUMNS = """
SELECT json_group_array(json_array(m.name, c.name)) FROM sqlite_schema m JOIN pragma_table_info(m.name) c
WHERE m.type = 'table' AND m.name GLOB 'eventlog_*'
"""
INDEXES = "SELECT json_group_array(name) FROM sqlite_schema WHERE type = 'index' AND tbl_name GLOB 'eventlog_*'"
VERSION = "SELECT coalesce(max(version), 0) FROM eventlog_schema_versions"
ADOPT = """
CREATE TABLE eventlog_schema_versions (
  version INTEGER NOT NULL PRIMARY KEY, file TEXT NOT NULL, applied_date TEXT NOT NULL)
"""
ADOPTED = "INSERT INTO eventlog_schema_versions VALUES (?, ?, strftime('%Y-%m-%d %H:%M:%f000', 'now'))"
