"""Connections to a database server: pools, loop connections, cluster locks in a thread, identity, and the watch."""
