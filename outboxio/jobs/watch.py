"""Tells statistics and telemetry of a run: that the run begins, and how the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, Self

from outboxio.model.operating.job import JobResult
from outboxio.model.redaction import Redact
from outboxio.statistics.jobs import JobStatistics
from outboxio.support.log import log_of, type_name
from outboxio.telemetry.protocol import JobCall

P = ParamSpec("P")

logger = log_of(__name__)


class JobWatch:
    """Surrounds a run. Telemetry that fails is logged, and the run goes on."""

    def __init__(self, statistics: JobStatistics, call: Callable[[], JobCall], redact: Redact) -> None:
        """``call`` asks telemetry about the run."""
        self._statistics = statistics
        self._redact = redact
        self._call: JobCall | None = None
        self._began = asyncio.get_running_loop().time()
        try:
            self._call = call()
        except Exception as error:
            _log(error)

    def __enter__(self) -> Self:
        if self._call is not None:
            _safely(self._call.__enter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is not None:
            _safely(self._call.__exit__, kind, error, trace)

    def ended(self, result: JobResult, error: BaseException | None = None) -> None:
        """The end of the run is written."""
        self._statistics.durations[result.lower()].add(asyncio.get_running_loop().time() - self._began)
        if self._call is not None:
            _safely(self._call.ended, result, error, self._redact)


def _safely(tell: Callable[P, Any], *args: P.args, **options: P.kwargs) -> None:
    try:
        tell(*args, **options)
    except Exception as error:
        _log(error)


def _log(error: Exception) -> None:
    logger.error("telemetry failed, and the run of a job goes on: %s", error, error_type=type_name(error))
