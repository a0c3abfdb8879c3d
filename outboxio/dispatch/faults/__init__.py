"""Faults outside of a run: a process that runs nothing, and handlers of which the service is away."""
