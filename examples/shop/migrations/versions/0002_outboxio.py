"""The tables of outboxio, written by ``outboxio alembic-revision``."""

from alembic import op

from outboxio.integrations import alembic as outboxio

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    outboxio.upgrade(op, to=6)


def downgrade() -> None:
    outboxio.downgrade_refused(op)
