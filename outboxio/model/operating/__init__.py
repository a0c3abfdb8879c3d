"""The data types of operations: filters, groups of failures, and records of operations."""
