"""The tables of outboxio."""

from alembic import op

from outboxio.integrations import alembic as outboxio

# Written by: outboxio alembic-revision
revision = "0001"
down_revision = None


def upgrade() -> None:
    outboxio.upgrade(op, to=12)


def downgrade() -> None:
    outboxio.downgrade_refused(op)
