"""The telemetry interface: which telemetry an outbox has, and how a sampled row is recognized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from outboxio import Outbox
from outboxio.model.notification import Notification
from outboxio.telemetry import Execution, Telemetry
from outboxio.telemetry.protocol import (
    NO_TELEMETRY,
    TelemetryChoice,
    carried,
    remove_from_process,
    use_in_process,
    with_trace,
)

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"


class Counting(Telemetry):
    """Counts the executions."""

    def __init__(self) -> None:
        self.executions = 0

    def executing(self, *args: Any, **options: Any) -> Execution:
        self.executions += 1
        return Execution()


class OfProcess(Counting):
    """Is not needed by outboxes with telemetry of the same kind."""

    def yields_to(self, given: Telemetry) -> bool:
        return isinstance(given, Counting)


@pytest.fixture
def of_process() -> Iterator[OfProcess]:
    telemetry = OfProcess()
    use_in_process(telemetry)
    yield telemetry
    remove_from_process(telemetry)


def execute(choice: TelemetryChoice) -> None:
    with choice.chosen.executing("app", "default", "Pay", None) as execution:
        execution.repeated()


def test_an_outbox_without_telemetry_has_a_no_op() -> None:
    choice = TelemetryChoice()

    assert choice.chosen is NO_TELEMETRY
    execute(choice)


def test_several_telemetries_are_called_in_order() -> None:
    first, second = Counting(), Counting()
    execute(TelemetryChoice([first, second]))

    assert (first.executions, second.executions) == (1, 1)


def test_telemetry_is_called_only_for_its_outboxes() -> None:
    class Attached(Telemetry):
        def __init__(self) -> None:
            self.outboxes: list[Outbox] = []

        def attached(self, outbox: Outbox) -> None:
            self.outboxes.append(outbox)

    first, second = Attached(), Attached()
    one, two = Outbox("sqlite://", namespace="a", telemetry=[first, second]), Outbox("sqlite://", namespace="b")

    assert first.outboxes == second.outboxes == [one]
    assert two.statistics.keys() == {"default"}


def test_telemetry_of_the_process_covers_outboxes_made_before_and_after() -> None:
    before, telemetry = TelemetryChoice(), OfProcess()
    use_in_process(telemetry)
    execute(before)
    execute(TelemetryChoice())
    remove_from_process(telemetry)
    execute(before)

    assert telemetry.executions == 2


def test_an_explicit_telemetry_may_replace_that_of_the_process(of_process: OfProcess) -> None:
    own, other = Counting(), Telemetry()
    execute(TelemetryChoice(own))
    execute(TelemetryChoice(other))

    assert (own.executions, of_process.executions) == (1, 1)


def row_with(context: Any) -> Notification:
    return Notification(uuid4(), "pay", "Placed", "{}", "PENDING", 0, 0, 0, 0, 0, context)


@pytest.mark.parametrize("kind", [str, str.encode, lambda text: msgspec.Raw(text.encode())])
@pytest.mark.parametrize("flags", ["00", "01", "02", "03", "ff", "fe"])
@pytest.mark.parametrize("more", [{}, {"tracestate": "a=1"}, {"a": "traceparent", "b": {"traceparent": PARENT}}])
@pytest.mark.parametrize("is_text", [False, True])
def test_a_sampled_row_is_recognised_in_the_text_of_its_headers(
    kind: Any, flags: str, more: dict[str, Any], is_text: bool
) -> None:
    headers: Any = {**more, "traceparent": PARENT + flags}
    context = [1, {"amount": 7}, msgspec.json.encode(headers).decode() if is_text else headers, None]

    for text in (msgspec.json.encode(context).decode(), msgspec.json.format(msgspec.json.encode(context)).decode()):
        assert row_with(kind(text)).may_be_sampled is bool(int(flags, 16) & 1)


def test_a_row_without_the_header_is_not_sampled() -> None:
    assert not row_with('[1,{"trace":"parent"},null]').may_be_sampled
    assert not row_with(b"null").may_be_sampled


def test_trace_headers_replace_older_ones_and_keep_the_others() -> None:
    headers = msgspec.json.encode({"tenant": "a", "traceparent": "old", "tracestate": "old"}).decode()
    merged = with_trace(headers, {"traceparent": "new"}, ("traceparent", "tracestate"))

    assert merged is not None
    assert msgspec.json.decode(merged) == {"tenant": "a", "traceparent": "new"}
    assert with_trace(None, {}, ("traceparent",)) is None
    assert with_trace('{"traceparent":"old"}', {}, ("traceparent",)) is None


def test_events_of_handlers_inherit_only_trace_headers() -> None:
    headers = {"traceparent": PARENT, "tenant": "a", "baggage": 7, "sentry-trace": "x"}

    assert carried(headers) == {"traceparent": PARENT, "sentry-trace": "x"}
