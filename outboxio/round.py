"""A round: at most about one batch of something. Services do rounds; the loop decides when."""

from __future__ import annotations

from msgspec import Struct


class Round(Struct, frozen=True):
    """What one round did: how many it found, and whether there is probably more."""

    found: int
    more: bool = False


NOTHING = Round(0)
