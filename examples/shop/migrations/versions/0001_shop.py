"""The tables of the shop."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "products",
        sa.Column("sku", sa.String(40), primary_key=True),
        sa.Column("cents", sa.Integer, nullable=False),
        sa.Column("stock", sa.Integer, nullable=False),
    )
    op.create_table(
        "orders",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("email", sa.String(100), nullable=False),
        sa.Column("sku", sa.String(40), sa.ForeignKey("products.sku"), nullable=False),
        sa.Column("quantity", sa.Integer, nullable=False),
        sa.Column("cents", sa.Integer, nullable=False),
        sa.Column("card", sa.String(40), nullable=False),
        sa.Column("address", sa.String(200), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
    )
    op.create_table(
        "history",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("order_id", sa.Integer, sa.ForeignKey("orders.id"), nullable=False, index=True),
        sa.Column("text", sa.String(200), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("history")
    op.drop_table("orders")
    op.drop_table("products")
