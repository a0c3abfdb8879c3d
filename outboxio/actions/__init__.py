"""The write side: the rows and events of an action commit in a single transaction."""
