"""Engines of SQLAlchemy as databases: the connections of an engine, and units of work (decision 31)."""
