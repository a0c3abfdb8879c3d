"""Run the migrations on the service's engine."""

import asyncio
from logging.config import fileConfig

from alembic import context
from sqlalchemy import Connection

from outboxio.integrations.alembic import include_name
from service.database import engine, url
from service.models import Base

if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)


def migrate(connection: Connection) -> None:
    # include_name makes autogenerate ignore outboxio's tables.
    context.configure(connection=connection, target_metadata=Base.metadata, include_name=include_name)
    with context.begin_transaction():
        context.run_migrations()


async def migrate_online() -> None:
    async with engine.connect() as connection:
        await connection.run_sync(migrate)
    await engine.dispose()


if context.is_offline_mode():  # alembic upgrade head --sql
    context.configure(url=url, target_metadata=Base.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    asyncio.run(migrate_online())
