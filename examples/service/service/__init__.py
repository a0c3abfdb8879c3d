"""An order service: FastAPI, SQLAlchemy, Alembic, Pydantic and outboxio."""
