"""Messages of the log are constant, fields are keyword arguments, and docs/reference/logs.md lists them all."""

from __future__ import annotations

import re

import pytest

from tests.kit.log_messages import PAGE, RUN, messages, table

pytestmark = pytest.mark.slow

_FIELD = re.compile(r"`outboxio_(\w+)`")


def test_the_page_lists_every_message_with_its_levels_and_fields() -> None:
    listed = PAGE.read_text("utf-8").partition("## All messages")[2].strip()

    # After a change: python -m tests.kit.log_messages --write
    assert set(table().splitlines()) - set(listed.splitlines()) == set(), "the page lacks these rows"
    assert set(listed.splitlines()) - set(table().splitlines()) == set(), "the source has no such messages"


def test_the_page_defines_every_field() -> None:
    text = PAGE.read_text("utf-8").partition("## All messages")[0]
    used = {field for message in messages() for field in message.fields} - {RUN}

    assert used - set(_FIELD.findall(text)) == set()


def test_the_scan_sees_the_messages() -> None:
    found = {message.text: message for message in messages()}

    failure = found["handler %r failed for event %s (attempt %d, now %s): %s"]
    assert (failure.logger, failure.levels) == ("outboxio.runs.failure_classifier", "INFO, WARNING, ERROR")
    assert set(failure.fields) == {RUN, "state", "error_type"}
    assert (
        found["stopping: running handlers have %s to finish; send the signal again to exit immediately"].levels
        == "INFO"
    )
