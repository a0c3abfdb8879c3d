"""Optional libraries that outboxio works with."""
