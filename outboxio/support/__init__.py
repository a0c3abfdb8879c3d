"""General helpers: time, text, identifiers, JSON, waiting."""
