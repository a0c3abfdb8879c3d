"""The tables of the service."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "orders",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("email", sa.String(100), nullable=False),
        sa.Column("cents", sa.Integer, nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
    )
    op.create_index("orders_by_state", "orders", ["state", "created_at"])
    op.create_table(
        "timeline",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("order_id", sa.Integer, sa.ForeignKey("orders.id"), nullable=False, index=True),
        sa.Column("text", sa.String(200), nullable=False),
    )
    op.create_table(
        "daily_sales",
        sa.Column("day", sa.Date, primary_key=True),
        sa.Column("orders", sa.Integer, nullable=False),
        sa.Column("cents", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("daily_sales")
    op.drop_table("timeline")
    op.drop_table("orders")
