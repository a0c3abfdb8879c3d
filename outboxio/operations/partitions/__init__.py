"""Partitions for operators: owners, counts, alarms, advice."""
