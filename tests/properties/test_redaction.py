"""Redaction of any document and text: no error is lost, and no password is shown."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outboxio.model.outcome import describe
from outboxio.model.redaction import checked_redact, keep_all, redacted_record
from outboxio.support.text import without_passwords
from tests.kit.properties import any_text, json_objects, text
from tests.unit.test_redaction import NOW, record


@given(json_objects(any_text), any_text, st.functions(like=lambda some: "", returns=st.none() | any_text))
def test_no_redaction_function_can_lose_an_error_or_a_record(
    document: dict[str, Any], message: str, redact: Any
) -> None:
    safe = checked_redact(redact)
    clean = json.loads(json.dumps(document).encode("utf-8", "replace").replace(b"\\ud", b"?"))

    stored = describe(ValueError(message), NOW, 1, redact=safe)
    seen = redacted_record(record(payload=clean, errors=[{"message": message, "hook_of": {"message": message}}]), safe)

    stored.encode()
    assert set(json.loads(stored)) == {"time", "type", "message", "traceback", "attempt"}
    assert isinstance(seen.payload, dict)
    assert len(seen.errors) == 1


@given(json_objects(text))
def test_without_a_redaction_function_everything_is_unchanged(document: dict[str, Any]) -> None:
    whole = record(payload=document, errors=[document])

    assert checked_redact(None) is keep_all
    assert redacted_record(whole, keep_all) is whole
    assert redacted_record(whole, checked_redact(lambda some: some)).payload == document


@given(st.text(st.characters(exclude_categories=["Z", "C"], exclude_characters="'\""), max_size=20))
def test_no_password_of_any_url_is_shown(password: str) -> None:
    secret = f"s3cret{password}s3cret"

    assert "s3cret" not in without_passwords(f"cannot open postgresql://ada:{secret}@host/app, sorry")
