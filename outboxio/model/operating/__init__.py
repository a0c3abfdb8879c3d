"""The values of orders of operators: filters and operations."""
