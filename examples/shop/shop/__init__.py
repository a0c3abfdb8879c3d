"""A shop on FastAPI, SQLAlchemy and outboxio. The README beside this folder is the tour."""
