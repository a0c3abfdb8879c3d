"""SQLAlchemy engines as databases: the connections of an engine, and the unit of each transaction (decision 31)."""
