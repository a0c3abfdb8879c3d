"""The signals of a shard run: services set a signal, and a loop waits for the signal."""

from __future__ import annotations

from outboxio.support.aio import Signal


class Signals:
    """A signal for each loop that a service can wake. The signals are made first, and handed to every part.

    Example::

        signals = Signals()
        settler = Settler(..., signals)                               # calls signals.settle.set()
        loop = Loop("outcomes", settler.settle_once, schedule, signal=signals.settle)
    """

    def __init__(self) -> None:
        self.fan_out = Signal()
        """There may be undelivered events."""
        self.find = Signal()
        """There may be due notifications."""
        self.settle = Signal()
        """Outcomes are ready to be written."""
        self.locks = Signal()
        """A cluster lock may be free, has to be proven, or can be given back."""
        self.jobs = Signal()
        """A job may be due, or has ended."""
        self.share = Signal()
        """Another process has given locks back, or has come or gone."""
