"""SQLite 3.35 and later, over the sqlite3 of the standard library."""
