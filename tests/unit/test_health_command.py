"""The options of ``outboxio health`` that do not go together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from outboxio import ConfigurationError
from outboxio.cli.commands.status import Question, question_of, refuse_target

NONE: dict[str, Any] = {"live": False, "ready": False, "max_age": None, "timeout": "5s", "port": None}


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"live": True}, "give --port beside them"),
        ({"ready": True}, "give --port beside them"),
        ({"live": True, "ready": True, "port": 1}, "two questions"),
        ({"live": True, "port": 1, "max_age": "1s"}, "--max-age goes with neither"),
        ({"max_age": "soon"}, "--max-age"),
        ({"timeout": "-1s"}, "--timeout"),
    ],
)
def test_questions_that_make_no_sense_are_refused_in_words(options: dict[str, Any], because: str) -> None:
    with pytest.raises(ConfigurationError, match=because):
        question_of(**{**NONE, **options})


def test_a_port_goes_with_no_outbox_and_no_database() -> None:
    for target, database in (("app:outbox", None), (None, "sqlite://")):
        with pytest.raises(ConfigurationError, match="give neither an outbox nor --database"):
            refuse_target(target, database)
    refuse_target(None, None)


def test_a_question_has_a_page_and_its_limits() -> None:
    assert question_of(**{**NONE, "ready": True, "port": 1}) == Question("ready", timedelta(seconds=5))
    assert question_of(**{**NONE, "max_age": "1m", "timeout": "1s"}) == Question(
        "health", timedelta(seconds=1), timedelta(minutes=1)
    )
