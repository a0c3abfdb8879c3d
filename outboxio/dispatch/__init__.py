"""Dispatch: due notifications are read, run and settled."""
