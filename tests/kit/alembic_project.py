"""An Alembic project: created by ``alembic init``, with the changes that the documentation describes."""

from __future__ import annotations

import io
from pathlib import Path

from alembic import command
from alembic.config import Config

from tests.kit import mysql

ASYNC_DRIVERS = {"postgresql": "asyncpg", "mysql": "aiomysql", "mariadb": "aiomysql", "sqlite": "aiosqlite"}
SYNC_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "mariadb": "pymysql", "sqlite": "pysqlite"}

MODELS = """
import sqlalchemy as sa
target_metadata = sa.MetaData()
sa.Table("orders", target_metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("state", sa.String(20)))
"""


def project(folder: Path, url: str, *, template: str = "async", configure: str = "") -> Config:
    """Create a project for the database. ``configure``: more arguments of ``context.configure``, as text."""
    config = Config(folder / "alembic.ini", stdout=io.StringIO(), output_buffer=io.StringIO())
    command.init(config, str(folder / "migrations"), template=template)
    ini = folder / "alembic.ini"
    ini.write_text(ini.read_text().replace("prepend_sys_path = .", ""))  # do not change the import path of the test run
    scheme = mysql.scheme_of(url)
    driver = (ASYNC_DRIVERS if template == "async" else SYNC_DRIVERS)[scheme]
    given = f"{scheme}+{driver}:{url.split(':', 1)[1]}"
    config.set_main_option("sqlalchemy.url", given.replace("%", "%%"))
    env = folder / "migrations" / "env.py"
    text = env.read_text().replace("target_metadata = None", MODELS)
    text = text.replace("target_metadata=target_metadata", f"target_metadata=target_metadata{configure}")
    # Do not configure the logging of the test run.
    env.write_text(text.replace("fileConfig(config.config_file_name)", "pass"))
    return config


def add_revision(config: Config, name: str, upgrade: str) -> None:
    """Add a hand-written revision with this statement."""
    script = command.revision(config, rev_id=name, message=name)
    path = Path(script.path)  # type: ignore[union-attr]
    imports = "from alembic import op\nfrom outboxio.integrations import alembic as outboxio\n"
    text = path.read_text().replace("from alembic import op\n", imports)
    path.write_text(text.replace("    pass\n", f"    {upgrade}\n", 1))
