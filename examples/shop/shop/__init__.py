"""A shop on FastAPI, SQLAlchemy and outboxio. The README in the folder above lists the files."""
