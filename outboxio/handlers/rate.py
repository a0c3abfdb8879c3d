"""The rate limit of a handler."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr

from outboxio.errors import SettingsError
from outboxio.support.duration import Duration, default_duration, format_duration, parse_duration

DEFAULT_BURST = 0.2  # seconds of the rate

_UNITS = {"sec": "s", "second": "s", "min": "m", "minute": "m", "hour": "h", "day": "d"}
_TEXT = re.compile(r"(\d+) */ *(\S.*)")
_EXPECTED = "text such as '100/s', '10/min' or '5/30s', or a Rate, as in Rate(100, per='1s', burst=20)"


class Rate(Struct, frozen=True):
    """A rate limit for the runs of a handler, for its option ``rate=``.

    ``limit``: the number of runs, 1 or more. ``per``: the period, for example ``"1s"`` or ``"1m"``. ``burst``: how many
    runs more than the rate may start in any time window, 1 or more. Default: the runs of 0.2 s, at least 1. In any
    window of ``w`` seconds at most ``limit * w / per + burst`` runs start.

    Raises :class:`~outboxio.SettingsError` for an invalid value.

    Example::

        @outbox.handler(InvoiceSent, name="mail", rate=Rate(100, per="1s", burst=20))
        async def send_mail(envelope: EventEnvelope[InvoiceSent]) -> None: ...
    """

    limit: int
    per: Duration = default_duration("1s")
    burst: int | None = None

    def __post_init__(self) -> None:
        _require_number("Rate.limit", self.limit)
        force_setattr(self, "per", parse_duration(self.per, key="Rate.per"))
        if self.per <= timedelta(0):
            raise SettingsError("Rate.per", self.per, "a duration longer than zero")
        if self.burst is not None:
            _require_number("Rate.burst", self.burst)

    @property
    def interval(self) -> float:
        """The seconds from one run to the next at this rate."""
        return self.per.total_seconds() / self.limit

    @property
    def most_at_once(self) -> int:
        """The burst, as given or by default."""
        return max(1, round(DEFAULT_BURST / self.interval)) if self.burst is None else self.burst

    def __str__(self) -> str:
        per = format_duration(self.per)
        return f"{self.limit}/{per[1:] if re.fullmatch('1[a-z]+', per) else per}"


def rate_of(rate: Any, refuse: Callable[[str], None]) -> Rate | None:
    """Return the validated option ``rate``; ``refuse`` raises."""
    if rate is None or isinstance(rate, Rate):
        return rate
    found = _TEXT.fullmatch(rate.strip()) if isinstance(rate, str) else None
    if found is not None:
        unit = _UNITS.get(found[2], found[2])
        try:
            return Rate(int(found[1]), per=f"1{unit}" if unit.isalpha() else unit)
        except SettingsError:
            pass  # refused below, with the whole text
    refuse(f"has rate={rate!r}; expected {_EXPECTED}")
    return None


def conflicting_rates(rate: Rate | None, per_key: bool, ordered: bool, batch: Any) -> list[tuple[bool, str]]:
    """Return the invalid combinations with other options: whether each is given, and why it is refused."""
    return [
        (per_key and rate is None, "rate_per_key=True without rate=; add for example rate='10/s'"),
        (
            per_key and not ordered,
            "rate_per_key=True without ordered=True: events of a key that is over its rate would block the events of "
            "all other keys; add ordered=True",
        ),
        (
            per_key and batch is not None,
            "rate_per_key=True and batch=: a call may contain events of many keys; remove one of them",
        ),
    ]


def _require_number(key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsError(key, value, "a whole number of 1 or more")
