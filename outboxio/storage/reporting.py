"""The rows of ``handler_minutes`` and ``instance_reports``, for all dialects."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import zip_longest
from typing import Any

import msgspec

from outboxio.storage.protocols.operating import HandlerMinute, InstanceReport

NUMBERS = ("succeeded", "failed", "dead", "expired", "skipped", "duration_us")

_counts = msgspec.json.Decoder(tuple[int, ...]).decode


def in_key_order(minutes: Iterable[HandlerMinute]) -> list[HandlerMinute]:
    """The minutes in the order of the primary key, in which every writer writes, so that writers do not deadlock."""
    return sorted(minutes, key=lambda minute: (minute.minute_date, minute.handler_name))


def numbers_of(minute: HandlerMinute) -> tuple[int, ...]:
    """The columns with numbers, in the order of the table."""
    return tuple(getattr(minute, name) for name in NUMBERS)


def rows_of(minutes: Iterable[HandlerMinute]) -> str:
    """The minutes as a JSON text: a list of rows, each with the columns of :func:`minute_of`, in the order of the key.

    The histograms are texts within the JSON text, because MariaDB's JSON_TABLE reads no arrays.
    """
    return _text([
        (m.handler_name, _moment(m.minute_date), *numbers_of(m), _text(m.durations), _text(m.lags))
        for m in in_key_order(minutes)
    ])  # fmt: skip


def minute_of(handler_name: str, minute_date: datetime, *rest: int | str) -> HandlerMinute:
    """A row as all dialects select the row. ``rest``: the numbers, and the histograms as JSON."""
    *numbers, durations, lags = rest
    return HandlerMinute(
        handler_name=handler_name, minute_date=minute_date, durations=_counts(str(durations)), lags=_counts(str(lags)),
        **dict(zip(NUMBERS, map(int, numbers), strict=True)),
    )  # fmt: skip


def summed(minutes: Iterable[HandlerMinute]) -> list[HandlerMinute]:
    """The minutes of several processes added up, by minute and handler name. ``minutes`` are in this order."""
    totals: list[HandlerMinute] = []
    for minute in minutes:
        last = totals[-1] if totals else None
        if last is None or (last.minute_date, last.handler_name) != (minute.minute_date, minute.handler_name):
            totals.append(minute)
        else:
            totals[-1] = _sum(last, minute)
    return totals


def _sum(one: HandlerMinute, other: HandlerMinute) -> HandlerMinute:
    numbers = _added(numbers_of(one), numbers_of(other))
    return HandlerMinute(
        handler_name=one.handler_name, minute_date=one.minute_date, durations=_added(one.durations, other.durations),
        lags=_added(one.lags, other.lags), **dict(zip(NUMBERS, numbers, strict=True)),
    )  # fmt: skip


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Two histograms added up. Other versions may write more buckets or fewer."""
    return tuple(map(sum, zip_longest(one, other, fillvalue=0)))


def values_of_report(namespace: str, report: InstanceReport) -> dict[str, Any]:
    """The values of the row, by the names of the columns."""
    return {
        "namespace": namespace,
        "instance": report.instance,
        "version": report.version,
        "started_date": report.started_date,
        "last_seen_date": report.last_seen_date,
        "delay_seconds": report.delay_seconds,
        "report": bytes(report.report).decode(),
    }


def report_of(
    instance: str, version: str, started: datetime, seen: datetime, delay: int, report: str
) -> InstanceReport:
    """A row as all dialects select the row."""
    return InstanceReport(
        instance=instance, version=version, started_date=started, last_seen_date=seen, delay_seconds=delay,
        report=msgspec.Raw(report.encode()),
    )  # fmt: skip


def _moment(moment: datetime) -> str:
    return moment.isoformat(" ", "microseconds")


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
