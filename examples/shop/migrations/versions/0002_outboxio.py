"""The tables of outboxio."""

from alembic import op

from outboxio.integrations import alembic as outboxio

# Written by: outboxio alembic-revision
revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    outboxio.upgrade(op, to=12)


def downgrade() -> None:
    outboxio.downgrade_refused(op)
