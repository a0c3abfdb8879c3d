"""A handler that charges a card twice after a crash, and the simulation that finds it."""
