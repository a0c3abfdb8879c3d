"""Events in transactions that the application opens and commits."""
