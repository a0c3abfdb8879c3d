"""The orders of operators: recorded in ``operations``, and carried out at once or piece by piece."""
