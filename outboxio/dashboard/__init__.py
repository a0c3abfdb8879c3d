"""The dashboard: pages on which an operator sees what is wrong, and mends the fault."""
