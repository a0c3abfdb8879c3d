"""Other libraries that outboxio works with; each is optional."""
