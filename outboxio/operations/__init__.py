"""Queries and operations for operators, and housekeeping."""
