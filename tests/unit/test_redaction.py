from __future__ import annotations

import json
import logging
import re
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from outboxio import ConfigurationError, NotificationRecord, Outbox, State
from outboxio.model.outcome import describe
from outboxio.model.redaction import LONGEST_MESSAGE, checked_redact, redacted_record
from outboxio.support.log import log_text
from outboxio.support.text import without_passwords

NOW = datetime(2030, 1, 1, 12)
CARD = "4111111111111111"


def hide_cards(some: str) -> str:
    return re.sub(r"\d{16}", "(card)", some)


def error_with_card() -> ValueError:
    try:
        raise ValueError(f"no money on {CARD}")
    except ValueError as error:
        error.add_note(f"tried {CARD} twice")
        return error


def record(**columns: Any) -> NotificationRecord:
    values: dict[str, Any] = {
        **dict.fromkeys(("id", "event_id", "action_id"), UUID(int=1)),
        **dict.fromkeys(("handler_name", "namespace", "action_name", "event_type", "shard"), "x"),
        **dict.fromkeys(
            ("started_date", "completion_date", "event_date", "next_retry_at", "created_date", "updated_date",
             "retention_from"), NOW,
        ),
        **dict.fromkeys(("model_id", "model_type", "ordering_key", "correlation_id", "causation_id"), None),
        **dict.fromkeys(("attempts", "sequence", "priority", "hops", "partition_number"), 0),
        "state": State.DEAD, "action_params": {}, "payload": None, "headers": None, "errors": [],
    }  # fmt: skip
    return NotificationRecord(**values | columns)


def test_type_message_and_traceback_of_an_error_are_redacted() -> None:
    entry = json.loads(describe(error_with_card(), NOW, 1, redact=checked_redact(hide_cards)))

    assert CARD not in json.dumps(entry)
    assert entry["message"] == "no money on (card)"
    assert "tried (card) twice" in entry["traceback"]
    assert json.loads(describe(error_with_card(), NOW, 1, redact=checked_redact(str.upper)))["type"] == "VALUEERROR"


def test_errors_in_log_lines_are_redacted() -> None:
    assert log_text(error_with_card(), checked_redact(hide_cards)) == "ValueError('no money on (card)')"


def test_a_text_is_redacted_before_it_is_truncated() -> None:
    message = "x" * (LONGEST_MESSAGE - 10) + CARD

    entry = json.loads(describe(ValueError(message), NOW, 1, redact=checked_redact(hide_cards)))

    assert "4111" not in entry["message"]


def broken(some: str) -> str:
    raise LookupError(f"cannot look up {some}")


def leaves(some: str) -> str:
    raise SystemExit(some)


@pytest.mark.parametrize(
    ("redact", "said"),
    [
        (broken, "<omitted: redact failed with LookupError>"),
        (leaves, "<omitted: redact failed with SystemExit>"),
        (lambda some: None, "<omitted: redact returned NoneType>"),
        (lambda some: some.encode(), "<omitted: redact returned bytes>"),
    ],
)
def test_a_failing_redact_function_reveals_nothing(redact: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    safe = checked_redact(redact)

    entry = json.loads(describe(error_with_card(), NOW, 7, redact=safe))
    line = log_text(error_with_card(), safe)
    seen = redacted_record(record(payload={"card": CARD}, errors=[{"message": CARD, "attempt": 1}]), safe)

    assert (entry["type"], entry["message"], entry["traceback"], entry["attempt"]) == (said, said, said, 7)
    assert line == said
    assert (seen.payload, seen.errors) == ({"redacted": said}, [{"message": said, "attempt": 1}])
    assert all(entry.levelno == logging.ERROR and entry.exc_info is None for entry in caplog.records)
    assert CARD not in caplog.text


def test_documents_are_redacted_as_json_and_stay_objects() -> None:
    seen = redacted_record(
        record(
            payload={"card": CARD, "cents": 7, "name": "Ada"},
            action_params={"cards": [CARD]},
            headers={"x": {"y": f"{CARD}!"}},
        ),
        checked_redact(lambda some: re.sub(r'("name":)"[^"]*"', r'\1"(name)"', hide_cards(some))),
    )

    assert seen.payload == {"card": "(card)", "cents": 7, "name": "(name)"}
    assert seen.action_params == {"cards": ["(card)"]}
    assert seen.headers == {"x": {"y": "(card)!"}}


def test_a_redacted_document_that_is_not_json_is_shown_as_text() -> None:
    seen = redacted_record(record(payload={"card": int(CARD)}), checked_redact(hide_cards))

    assert seen.payload == {"redacted": '{"card":(card)}'}
    assert redacted_record(record(payload={"a": 1}), lambda some: "7").payload == {"redacted": "7"}


def test_errors_stored_earlier_are_redacted_when_they_are_shown() -> None:
    entry = {"time": "2030", "type": "E", "message": CARD, "traceback": f"at {CARD}", "attempt": 1}
    seen = redacted_record(record(errors=[{**entry, "hook_of": entry}]), checked_redact(hide_cards))

    clean = {**entry, "message": "(card)", "traceback": "at (card)"}
    assert seen.errors == [{**clean, "hook_of": clean}]


@pytest.mark.parametrize("redact", ["***", 7, re.compile("x")])
def test_a_redact_value_that_is_not_a_function_is_refused(redact: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"redact is .*; expected a function"):
        Outbox("sqlite://", namespace="app", redact=redact)


def test_an_async_function_is_refused() -> None:
    async def redact(some: str) -> str:
        return some

    redact_any: Any = redact
    with pytest.raises(ConfigurationError, match="not async"):
        Outbox("sqlite://", namespace="app", redact=redact_any)


# --- passwords in URLs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("postgresql://ada:s3cret@host/app", "postgresql://***@host/app"),
        ("mysql://ada@host", "mysql://***@host"),
        ("at redis://:s3c/re?t#@host:1/0, and on", "at redis://***@host:1/0, and on"),
        ("{'a': 'x://u:p@ss@h/d', 'b': 'y://h'}", "{'a': 'x://***@h/d', 'b': 'y://h'}"),
        ("postgresql:///app?user=ada&password=s3cret&x=1", "postgresql:///app?user=ada&password=***&x=1"),
        ("ada@example.org wrote", "ada@example.org wrote"),
        ("https://docs.python.org/3/", "https://docs.python.org/3/"),
    ],
)
def test_urls_are_shown_without_their_passwords(said: str, left: str) -> None:
    assert without_passwords(said) == left


def test_time_and_attempt_of_an_error_are_not_redacted() -> None:
    entry = json.loads(describe(ValueError(), NOW + timedelta(1), 3, redact=checked_redact(lambda some: "gone")))

    assert (entry["time"], entry["attempt"]) == ("2030-01-02T12:00:00.000000", 3)
