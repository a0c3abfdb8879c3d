"""aiomysql, and PyMySQL below it, which have no types: what we use of them gets some here."""

from __future__ import annotations

from typing import Any

import aiomysql as _aiomysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import pymysql as _pymysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingModuleSource]

_driver: Any = _aiomysql
_below: Any = _pymysql

connect: Any = _driver.connect
create_pool: Any = _driver.create_pool
Cursor: Any = _driver.Cursor
Connection: type[Any] = _driver.Connection

FOUND_ROWS: int = _below.constants.CLIENT.FOUND_ROWS

MySQLError: type[Exception] = _below.err.MySQLError
DataError: type[Exception] = _below.err.DataError
IntegrityError: type[Exception] = _below.err.IntegrityError
InterfaceError: type[Exception] = _below.err.InterfaceError
InternalError: type[Exception] = _below.err.InternalError
