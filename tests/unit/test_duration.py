from __future__ import annotations

from datetime import timedelta

import pytest

from outboxio.errors import SettingsError
from outboxio.support.duration import format_duration, parse_duration

ONE_SECOND = timedelta(seconds=1)


# --- parse_duration ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [ONE_SECOND, 1, 1.0, "1", "1.0", "1s", "1000ms", "1000000us", "PT1S", "PT1.0S"])
def test_a_duration_has_many_spellings(value: object) -> None:
    assert parse_duration(value) == ONE_SECOND


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500us", timedelta(microseconds=500)),
        ("500µs", timedelta(microseconds=500)),
        ("500μs", timedelta(microseconds=500)),
        ("20ms", timedelta(milliseconds=20)),
        ("2.5", timedelta(seconds=2.5)),
        (".5s", timedelta(seconds=0.5)),
        ("5m", timedelta(minutes=5)),
        ("1.5h", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("2w", timedelta(weeks=2)),
        ("1h30m", timedelta(minutes=90)),
        ("1m1ms", timedelta(minutes=1, milliseconds=1)),
        ("1w2d3h4m5s6ms7us", timedelta(9, 11045, 6007)),
    ],
)
def test_text_has_units_from_long_to_short(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PT0.2S", timedelta(milliseconds=200)),
        ("PT0,2S", timedelta(milliseconds=200)),
        ("PT5M", timedelta(minutes=5)),
        ("P7D", timedelta(days=7)),
        ("P2W", timedelta(weeks=2)),
        ("P1DT2H", timedelta(days=1, hours=2)),
        ("P1DT2H3M4.5S", timedelta(days=1, hours=2, minutes=3, seconds=4.5)),
        ("PT0S", timedelta(0)),
    ],
)
def test_iso_8601_durations_are_accepted(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", [" 90m ", "1h 30m", "1 h 30 m", "90 m"])
def test_single_spaces_between_numbers_and_units_are_ignored(text: str) -> None:
    assert parse_duration(text) == timedelta(minutes=90)


@pytest.mark.parametrize("value", [0, 0.0, "0", "0s", "0ms", timedelta(0)])
def test_zero_is_a_duration(value: object) -> None:
    assert parse_duration(value) == timedelta(0)


def test_decimal_fractions_are_exact_to_the_microsecond() -> None:
    assert parse_duration("1.000001s") == timedelta(seconds=1, microseconds=1)
    assert parse_duration(0.1) == timedelta(microseconds=100_000)


@pytest.mark.parametrize("value", [-1, -0.001, "-1", "-1s", "-PT1S", "PT-1S", timedelta(microseconds=-1)])
def test_a_negative_duration_is_refused(value: object) -> None:
    with pytest.raises(SettingsError, match="not negative"):
        parse_duration(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "nan", "inf", "infinity"])
def test_a_duration_that_is_not_finite_is_refused(value: object) -> None:
    with pytest.raises(SettingsError, match="finite"):
        parse_duration(value)


@pytest.mark.parametrize("value", [10**400, 1e300, "9" * 400, "1000000000d", "P999999999999W"])
def test_a_duration_too_large_for_timedelta_is_refused(value: object) -> None:
    with pytest.raises(SettingsError):
        parse_duration(value)


@pytest.mark.parametrize("value", [True, False, None, b"1s", [], {}, 1j])
def test_other_types_including_bool_are_refused(value: object) -> None:
    with pytest.raises(SettingsError):
        parse_duration(value)


@pytest.mark.parametrize(
    "text", ["", " ", "s", "P", "PT", "P1DT", "1x", "1s1", "1 2", "1.s", "1..5s", "1e3", "+1s", "1_0s"]
)
def test_text_that_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_duration(text)


@pytest.mark.parametrize("text", ["30m1h", "1s1s", "1ms1s"])
def test_unordered_or_repeated_units_are_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_duration(text)


@pytest.mark.parametrize("text", ["5M", "1H", "7D", "pt1s", "20MS"])
def test_units_are_case_sensitive(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_duration(text)


@pytest.mark.parametrize("text", ["P1Y", "P1M", "P1Y2M3D"])
def test_iso_years_and_months_are_refused_because_their_length_varies(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_duration(text)


def test_the_error_names_the_key_the_value_and_what_is_expected() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_duration("soon", key="handler_timeout")

    assert caught.value.key == "handler_timeout"
    assert caught.value.value == "soon"
    assert caught.value.expected.startswith("a duration: ")
    assert str(caught.value).startswith("setting handler_timeout = 'soon': expected a duration: ")


def test_without_a_key_the_error_says_duration() -> None:
    with pytest.raises(SettingsError, match="setting duration = 'soon'"):
        parse_duration("soon")


@pytest.mark.parametrize("text", ["1" * 50_000 + "x", "1 " * 50_000, "1." * 50_000, "P" + "1" * 50_000])
def test_long_invalid_text_is_refused_without_backtracking(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_duration(text)


# --- format_duration -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        (timedelta(0), "0s"),
        (timedelta(microseconds=500), "500us"),
        (timedelta(milliseconds=20), "20ms"),
        (timedelta(microseconds=1500), "1.5ms"),
        (timedelta(microseconds=999_999), "999.999ms"),
        (timedelta(seconds=1), "1s"),
        (timedelta(seconds=1.5), "1.5s"),
        (timedelta(seconds=10), "10s"),
        (timedelta(seconds=90), "1m30s"),
        (timedelta(minutes=1, milliseconds=50), "1m0.05s"),
        (timedelta(minutes=5), "5m"),
        (timedelta(minutes=90), "1h30m"),
        (timedelta(days=7), "7d"),
        (timedelta(days=1, seconds=1), "1d1s"),
        (timedelta(seconds=-90), "-1m30s"),
    ],
)
def test_a_duration_is_formatted_compactly(duration: timedelta, expected: str) -> None:
    assert format_duration(duration) == expected


@pytest.mark.parametrize(
    "microseconds", [0, 1, 999, 1001, 123_456, 1_000_001, 59_999_999, 3_600_000_000, 694_861_000_007]
)
def test_a_formatted_duration_is_parsed_back_unchanged(microseconds: int) -> None:
    duration = timedelta(microseconds=microseconds)

    assert parse_duration(format_duration(duration)) == duration
