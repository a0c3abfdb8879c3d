"""Charts as SVG. Colours come from classes in the style sheet, because the pages forbid inline styles.

All functions are pure, and turn numbers into text. The result contains no text from users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from outboxio.dashboard.showing.shown import bound, number
from outboxio.model.operating.groups import HistoryPoint
from outboxio.statistics.figures import LAGS

_SCALE_WIDTH = 44  # at the right, for the labels of the scale


def spark(values: Sequence[float], width: int = 120, height: int = 24) -> Markup:
    """Draw numbers as a small line, oldest first. Zero is at the bottom."""
    if not values:
        return Markup("")
    top = max(*values, 0.0) if len(values) > 1 else max(values[0], 0.0)
    step = width / max(1, len(values) - 1)
    points = [
        f"{position * step:.1f},{height - 1.5 - (value / top if top else 0.0) * (height - 3):.1f}"
        for position, value in enumerate(values)
    ]
    line = " ".join(points)
    area = f"0,{height} {line} {width},{height}"
    label = f"from {values[0]:,.0f} to {values[-1]:,.0f}, at most {top:,.0f}"
    flat = "" if top else " flat"
    return Markup(
        f'<svg class="spark{flat}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{label}" preserveAspectRatio="none"><polygon class="spark-area" points="{area}"/>'
        f'<polyline class="spark-line" points="{line}"/></svg>'
    )


def bars(points: Sequence[HistoryPoint], width: int = 1080, height: int = 200) -> Markup:
    """Draw stacked columns with tooltips: succeeded, failed and failed permanently in each period, oldest first."""
    if not points:
        return Markup("")
    plot = height - 18  # the labels of the times are below
    top = nice_top(max(one.succeeded + one.failures for one in points))
    step = (width - _SCALE_WIDTH) / len(points)
    parts = [_scale(top, width, plot)]
    for position, one in enumerate(points):
        parts.append(_column(one, position * step, step, plot, top))
    total = sum(one.succeeded for one in points), sum(one.failures for one in points)
    label = f"{total[0]:,} succeeded, {total[1]:,} failed"
    return _drawn("".join([*parts, *_times(points, step, height)]), label, width, height)


def lags(points: Sequence[HistoryPoint], width: int = 720, height: int = 200) -> Markup:
    """Draw columns, oldest first: the bound below which 95 % of the delivery lags of each period were."""
    if not points:
        return Markup("")
    plot = height - 18
    known = [_bounded(one.lag_p95) for one in points]
    top = max([0.1, *(value for value in known if value is not None)])
    step = (width - _SCALE_WIDTH) / len(points)
    parts = [_scale(top, width, plot, bound)]
    for position, (one, value) in enumerate(zip(points, known, strict=True)):
        x, size = position * step, 0.0 if value is None else max(1.0, value / top * plot)
        label = (
            "no run" if value is None else f"95 % started within {bound(one.lag_p95)}, half within {bound(one.lag_p50)}"
        )
        column = _bar("lag", x, step, plot - size, size) if size else ""
        parts.append(f"<g><title>{one.begin:%H:%M} {label}</title>{_hover(x, step, plot)}{column}</g>")
    worst = max((value for value in known if value is not None), default=None)
    label = "no run" if worst is None else f"delivery lag, p95 by minute: at most {bound(worst)}"
    return _drawn("".join([*parts, *_times(points, step, height)]), label, width, height)


def _bounded(seconds: float | None) -> float | None:
    """Limit a value to the largest bound, for drawing."""
    return None if seconds is None else min(seconds, LAGS[-1])


def nice_top(largest: int) -> int:
    """Return the top of a scale: an even number with one digit and zeros, such as 6, 30, 400; at least 4."""
    if largest <= 4:
        return 4
    step = 1
    while step * 10 < largest:
        step *= 10
    return next(step * factor for factor in (2, 3, 4, 6, 8, 10) if step * factor >= largest and step * factor % 2 == 0)


def _column(one: HistoryPoint, x: float, step: float, plot: int, top: int) -> str:
    parts: list[str] = []
    y, lost = float(plot), one.dead + one.expired
    for name, value in (("ok", one.succeeded), ("failed", one.failed), ("dead", lost)):
        if value:
            size = max(1.0, value / top * plot)
            y -= size
            parts.append(_bar(name, x, step, y, size))
    label = f"{one.begin:%H:%M} {one.succeeded:,} succeeded, {one.failed:,} failed, {lost:,} failed permanently"
    return f"<g><title>{label}</title>{_hover(x, step, plot)}{''.join(parts)}</g>"


def _bar(name: str, x: float, step: float, y: float, size: float) -> str:
    gap = min(2.0, step / 4)
    at = f'x="{x + gap / 2:.1f}" y="{y:.1f}" width="{step - gap:.1f}" height="{size:.1f}"'
    return f'<rect class="bar-{name}" {at}/>'


def _hover(x: float, step: float, plot: int) -> str:
    return f'<rect class="bar-hover" x="{x:.1f}" y="0" width="{step:.1f}" height="{plot}"/>'


def _times(points: Sequence[HistoryPoint], step: float, height: int) -> list[str]:
    """Return the labels below the columns."""
    every = max(1, round(len(points) / 6))
    return [
        f'<text class="chart-label" x="{at * step:.1f}" y="{height - 4}">{points[at].begin:%H:%M}</text>'
        for at in range(0, len(points), every)
    ]


def _drawn(parts: str, label: str, width: int, height: int) -> Markup:
    return Markup(f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{parts}</svg>')


def _scale(top: float, width: int, plot: int, label_of: Callable[[float], str] = number) -> str:
    parts: list[str] = []
    for part in (0.0, 0.5, 1.0):
        y = max(0.5, plot - part * plot)
        parts.append(f'<line class="chart-line" x1="0" x2="{width - _SCALE_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if part:
            under = y + (11 if part == 1 else 4)
            label = label_of(top * part)
            parts.append(f'<text class="chart-label" x="{width}" y="{under:.1f}" text-anchor="end">{label}</text>')
    return "".join(parts)
