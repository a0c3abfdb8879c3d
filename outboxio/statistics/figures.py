"""Figures: the numbers of the tables that metrics show, as the holder of the fan-out lock has last read them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

MOST_COUNTED = 10_000  # rows of a handler; a larger number shows as this number


class HandlerFigures(Struct, frozen=True, kw_only=True):
    """The notifications of a handler. Every number is counted up to a bound."""

    due: int = 0
    due_age: float = 0.0
    """Seconds for which the oldest due notification has been due; 0.0 without such a notification."""
    retrying: int = 0
    """Notifications that are due later: they wait for a retry or for their moment."""
    dead: int = 0
    """DEAD and EXPIRED notifications that retention still keeps."""
    dead_recently: int = 0
    """DEAD and EXPIRED notifications that ended within the last hour."""
    blocked: int = 0
    parked_keys: int = 0


class JobFigures(Struct, frozen=True, kw_only=True):
    """The row of a job."""

    due_age: float = 0.0
    """Seconds for which the job has been due without a run; 0.0 while the job waits, runs or is paused."""
    failing: bool = False
    """True if the last run did not succeed, and its attempts are used up."""
    paused: bool = False


class Figures(Struct, frozen=True, kw_only=True):
    """The tables of a shard at a moment."""

    moment: datetime
    handlers: Mapping[str, HandlerFigures] = {}
    """By the present name of the handler, or the stored name without a handler here."""
    jobs: Mapping[str, JobFigures] = {}
    """By the name of the job, on the first shard."""
    undelivered: int = 0
    """Events that wait for fan-out, and that a handler wants."""
    undelivered_age: float = 0.0
    """Seconds for which the oldest event has waited for fan-out; 0.0 without such an event."""
    unwanted: int = 0
    """Events that wait and that no handler wants by type. Events on a topic count here while fan-out is behind."""
    unroutable: int = 0
