"""Telemetry: the callbacks of an outbox for tracing and error tracking, and the headers that carry a trace."""

from outboxio.telemetry.protocol import (
    Call,
    CalledHandler,
    Execution,
    HandlingTelemetry,
    Round,
    RoundKind,
    Sending,
    Telemetry,
)

__all__ = ["Call", "CalledHandler", "Execution", "HandlingTelemetry", "Round", "RoundKind", "Sending", "Telemetry"]
