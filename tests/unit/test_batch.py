from __future__ import annotations

import sys
from datetime import datetime, timedelta
from typing import Any

import pytest

from outboxio import Batch, ConfigurationError, SettingsError
from outboxio.handlers.options import next_time_of


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "setting Batch.size = 0: expected a whole number from 1 to 10000"),
        ({"size": 10_001}, "Batch.size"),
        ({"size": True}, "Batch.size"),
        ({"size": 1.5}, "Batch.size"),
        ({"max_wait": -1}, "Batch.max_wait"),
        ({"max_wait": "soon"}, "Batch.max_wait"),
        ({"max_wait": "1s", "schedule": "* * * * *"}, "Batch.max_wait"),
        ({"schedule": "midnight"}, "setting Batch.schedule = 'midnight': expected a cron expression of five fields"),
        ({"schedule": "* * * * * *"}, "Batch.schedule"),
        ({"schedule": "61 * * * *"}, "Batch.schedule"),
        ({"schedule": "0 0 30 2 *"}, "Batch.schedule"),
        ({"schedule": 5}, "Batch.schedule"),
    ],
)
def test_an_invalid_batch_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Batch(**given)

    assert message in str(caught.value)


def test_durations_use_the_common_format() -> None:
    assert Batch(max_wait="250ms").max_wait == timedelta(milliseconds=250)
    assert (Batch().longest_wait, Batch(max_wait=0).longest_wait) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("schedule", "after", "expected"),
    [
        ("0 0 * * *", datetime(2026, 1, 31, 13), datetime(2026, 2, 1)),
        ("0 0 * * *", datetime(2026, 1, 31), datetime(2026, 2, 1)),
        ("*/5 * * * *", datetime(2026, 1, 1, 0, 4, 59, 999_999), datetime(2026, 1, 1, 0, 5)),
        ("0 9 * * MON", datetime(2026, 1, 1), datetime(2026, 1, 5, 9)),
    ],
)
def test_a_schedule_returns_the_next_scheduled_time(schedule: str, after: datetime, expected: datetime) -> None:
    assert next_time_of(schedule)(after) == expected


def test_a_schedule_without_its_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'outboxio\[cron\]'"):
        Batch(schedule="0 0 * * *")
