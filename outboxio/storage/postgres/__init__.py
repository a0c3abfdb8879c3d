"""PostgreSQL 14 and later, over asyncpg."""
