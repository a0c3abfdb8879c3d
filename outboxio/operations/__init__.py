"""For operators and for housekeeping: counts, lists, retries, retention."""
