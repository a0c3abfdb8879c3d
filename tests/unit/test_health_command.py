"""Conflicting options of ``outboxio health``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from outboxio import ConfigurationError
from outboxio.cli.commands.status import HealthQuery, health_query, refuse_target

NONE: dict[str, Any] = {"live": False, "ready": False, "max_age": None, "timeout": "5s", "port": None}


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"live": True}, "add --port"),
        ({"ready": True}, "add --port"),
        ({"live": True, "ready": True, "port": 1}, "exclude each other"),
        ({"live": True, "port": 1, "max_age": "1s"}, "--max-age cannot be used with --live or --ready"),
        ({"max_age": "soon"}, "--max-age"),
        ({"timeout": "-1s"}, "--timeout"),
    ],
)
def test_conflicting_options_are_refused_with_a_clear_error(options: dict[str, Any], because: str) -> None:
    with pytest.raises(ConfigurationError, match=because):
        health_query(**{**NONE, **options})


def test_a_port_cannot_be_combined_with_outbox_or_database() -> None:
    for target, database in (("app:outbox", None), (None, "sqlite://")):
        with pytest.raises(ConfigurationError, match="it cannot be used with an outbox or --database"):
            refuse_target(target, database)
    refuse_target(None, None)


def test_an_http_probe_has_a_page_and_limits() -> None:
    assert health_query(**{**NONE, "ready": True, "port": 1}) == HealthQuery("ready", timedelta(seconds=5))
    assert health_query(**{**NONE, "max_age": "1m", "timeout": "1s"}) == HealthQuery(
        "health", timedelta(seconds=1), timedelta(minutes=1)
    )
