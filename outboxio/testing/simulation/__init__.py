"""Deterministic simulation: an application's processes in virtual time, with faults that depend on the seed."""

from outboxio.testing.simulation.loop import SimulationFailed
from outboxio.testing.simulation.simulate import simulate
from outboxio.testing.simulation.world import Process, World

__all__ = ["Process", "SimulationFailed", "World", "simulate"]
