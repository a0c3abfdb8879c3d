"""Durations, backoff, settings and names, for any value."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from outboxio import InvalidEvent, RegistrationError, RetryPolicy, Settings, SettingsError
from outboxio.handlers.handler import make_handler
from outboxio.model.event import Event, checked_name, checked_text
from outboxio.model.lock_name import LockName, channel_name
from outboxio.support.duration import format_duration, parse_duration, pause_after
from tests.kit.properties import any_text, json_values, names, text

ZERO = timedelta(0)
DURATIONS = st.timedeltas(min_value=ZERO)
UNITS = {"w": 604_800_000_000, "d": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000,
         "us": 1}  # fmt: skip
NOW = datetime(2030, 1, 1, 12)
ANY_VALUE = json_values(any_text, st.integers() | st.floats()) | st.timedeltas() | st.datetimes() | st.binary()

# --- durations -----------------------------------------------------------------------------------


@given(DURATIONS)
@example(timedelta.max)
def test_every_duration_is_read_back_unchanged(duration: timedelta) -> None:
    assert parse_duration(format_duration(duration)) == duration


@given(st.timedeltas(max_value=timedelta(microseconds=-1)))
def test_negative_durations_are_formatted_but_not_parsed(duration: timedelta) -> None:
    assume(duration != timedelta.min)  # it has no positive counterpart
    assert format_duration(duration) == f"-{format_duration(-duration)}"
    with pytest.raises(SettingsError):
        parse_duration(duration)


@given(st.dictionaries(st.sampled_from(list(UNITS)), st.integers(0, 5000), min_size=1), st.booleans())
def test_units_add_up_in_any_spelling(parts: dict[str, int], spaced: bool) -> None:
    ordered = [(unit, parts[unit]) for unit in UNITS if unit in parts]
    written = (" " if spaced else "").join(f"{number}{unit}" for unit, number in ordered)

    assert parse_duration(written) == timedelta(microseconds=sum(n * UNITS[unit] for unit, n in ordered))


@given(st.integers(0, 99999), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_iso_8601_adds_up(days: int, hours: int, minutes: int, seconds: int) -> None:
    expected = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)

    assert parse_duration(f"P{days}DT{hours}H{minutes}M{seconds}S") == expected


LIKELY = st.text("0123456789.,-+ PTwdhmsuµeE\u0663", max_size=12)


@given(ANY_VALUE | any_text | LIKELY)
def test_any_value_is_a_duration_or_refused_by_name(value: object) -> None:
    try:
        duration = parse_duration(value, key="the_key")
    except SettingsError as refusal:
        assert refusal.key == "the_key"
    else:
        assert isinstance(duration, timedelta)
        assert duration >= ZERO


# --- backoff -------------------------------------------------------------------------------------

POLICIES = st.builds(
    RetryPolicy,
    base=st.timedeltas(min_value=ZERO, max_value=timedelta(days=36_500)),
    factor=st.floats(1, 1e300) | st.integers(1, 10**40),
    cap=st.none() | st.timedeltas(min_value=ZERO, max_value=timedelta(days=36_500)),
    jitter=st.floats(0, 1),
)
SECOND = timedelta(seconds=1)


@given(POLICIES, st.integers(1, 10**9))
@example(RetryPolicy(factor=1e300), 7)
def test_no_wait_is_negative_or_above_the_cap_plus_jitter(policy: RetryPolicy, attempts: int) -> None:
    cap = policy.cap if policy.cap is not None else timedelta(minutes=5)

    wait = policy.wait_after(attempts, ValueError(), timedelta(minutes=5))

    assert ZERO <= wait <= cap * (1 + policy.jitter) + timedelta(milliseconds=1)


@given(POLICIES, st.integers(1, 1000))
def test_a_later_wait_is_never_shorter_apart_from_jitter(policy: RetryPolicy, attempts: int) -> None:
    exact = RetryPolicy(base=policy.base, factor=policy.factor, cap=policy.cap, jitter=0)

    first, second = (exact.wait_after(n, ValueError(), timedelta(minutes=5)) for n in (attempts, attempts + 1))

    assert first <= second


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("base", "cap", "retention"), ANY_VALUE)))
def test_a_policy_of_any_durations_is_valid_or_refused(given: dict[str, Any]) -> None:
    try:
        policy = RetryPolicy(**given)
    except SettingsError as refusal:
        assert refusal.key.startswith("RetryPolicy.")
    else:
        assert all(value is None or value >= ZERO for value in (policy.base, policy.cap, policy.retention))


@given(st.integers(1, 10**9))
def test_the_delay_of_a_failing_loop_stays_within_its_bounds(failures: int) -> None:
    assert 0.07 < pause_after(failures) <= 5 * 1.25


# --- settings ------------------------------------------------------------------------------------

LEAFS = sorted(Settings.__struct_fields__)
LEAF = st.sampled_from(LEAFS)


def camel(leaf: str) -> str:
    return re.sub(r"_(\w)", lambda found: found[1].upper(), leaf)


def kebab(leaf: str) -> str:
    return leaf.replace("_", "-")


@given(LEAF, ANY_VALUE | LIKELY | st.sampled_from(["5m", "yes", "off", "17", 3, True]))
def test_any_value_of_any_setting_is_valid_or_refused_by_name(leaf: str, value: object) -> None:
    try:
        settings = Settings.load({leaf: value}, environ=None)
    except SettingsError as refusal:
        assert leaf in refusal.key or refusal.key.startswith(leaf)
    else:
        found = getattr(settings, leaf)
        assert type(found) is type(getattr(Settings(), leaf))
        assert not isinstance(found, timedelta) or ZERO <= found <= timedelta(days=36_500)
        assert isinstance(found, bool) or not isinstance(found, int) or found >= 1


@given(LEAF, st.data())
def test_every_spelling_of_a_setting_means_the_same(leaf: str, data: st.DataObject) -> None:
    default = getattr(Settings(), leaf)
    if isinstance(default, bool):
        value: Any = not default
    elif leaf == "balance":
        value = "all"
    elif isinstance(default, int):
        value = data.draw(st.integers(1, 10**9))
    else:
        value = data.draw(st.timedeltas(min_value=timedelta(milliseconds=50), max_value=timedelta(days=1)))
    written = format_duration(value) if isinstance(value, timedelta) else str(value)
    first, _, rest = leaf.partition("_")
    nested = {first: {kebab(rest): value}} if rest else {leaf: value}

    read = [
        Settings(**{leaf: value}),
        Settings.load({kebab(leaf): written}, environ=None),
        Settings.load({camel(leaf): value}, environ=None),
        Settings.load({"tool": {"outboxio": nested}}, environ=None),
        Settings.load(None, environ={f"OUTBOXIO_{leaf.upper()}": written}),
        Settings.load({leaf: default}, environ={f"OUTBOXIO_{leaf.upper()}": written}),
    ]

    assert all(settings == read[0] for settings in read)
    assert getattr(read[0], leaf) == value


@given(st.dictionaries(any_text, ANY_VALUE, min_size=1, max_size=3))
def test_unknown_settings_are_never_accepted(table: dict[str, Any]) -> None:
    assume(not table.keys() & {*LEAFS, "outboxio", "tool", "handling", "fanout"})

    try:
        assert Settings.load(table, environ=None) == Settings()  # an empty group sets nothing
    except SettingsError as refusal:
        assert any(refusal.key.startswith(key) for key in table)


@given(st.dictionaries(any_text.map(lambda some: f"OUTBOXIO_{some}") | any_text, any_text, max_size=4))
def test_unknown_variables_are_refused_without_their_value(environ: dict[str, str]) -> None:
    ours = [key for key in environ if key.startswith("OUTBOXIO_")]
    assume(not any(key.startswith(("OUTBOXIO_TEST_", "OUTBOXIO_DATABASE")) for key in ours))
    if not ours:
        assert Settings.load(environ=environ) == Settings()
        return
    with pytest.raises(SettingsError) as caught:
        Settings.load(environ=environ)
    assert caught.value.value == "<not shown>"


# --- names ---------------------------------------------------------------------------------------

ROLES = st.sampled_from(["fanout", "dispatch", "probe", "inbox", "consume"])
LOCKS = st.builds(LockName, names, ROLES, st.just("") | names)
CLOSE = st.text("a/%~\0025", min_size=1, max_size=6)


@given(st.lists(LOCKS | st.builds(LockName, CLOSE, ROLES, CLOSE), min_size=2, max_size=8, unique=True))
@example([LockName("a/dispatch/b", "fanout"), LockName("a", "dispatch", "b/fanout")])
@example([LockName("a%2Fb", "fanout"), LockName("a/b", "fanout")])
def test_two_locks_never_share_a_lease_key_or_text(locks: list[LockName]) -> None:
    for forms in ({lock.lease for lock in locks}, {lock.key for lock in locks}, {lock.text for lock in locks}):
        assert len(forms) == len(locks)


@given(LOCKS)
def test_every_lock_name_fits_its_columns_and_key(lock: LockName) -> None:
    assert len(lock.lease) <= 255
    assert lock.text.isascii()
    assert len(lock.text) <= 64
    assert -(2**63) <= lock.key < 2**63


@given(names, names)
def test_two_namespaces_never_share_a_channel(first: str, second: str) -> None:
    assume(first != second)
    assert channel_name(first) != channel_name(second)
    assert re.fullmatch(r"[a-z_0-9]{1,63}", channel_name(first))


@given(ANY_VALUE | any_text | st.text(st.characters(), min_size=250, max_size=260))
def test_a_name_fits_its_column_or_is_refused(value: object) -> None:
    for checked in (checked_name, checked_text):
        try:
            name = checked(value, "the subject")
        except InvalidEvent as refusal:
            assert refusal.subject == "the subject"
        else:
            assert name == value
            assert len(name) <= 255
            assert "\0" not in name
            name.encode()


class Opened(Event):
    number: int


async def handle(envelope: Any) -> None: ...


@given(any_text, st.sets(any_text, max_size=3), st.none() | any_text)
def test_a_handlers_names_are_storable_or_refused_with_their_location(
    name: str, aliases: set[str], topic: str | None
) -> None:
    try:
        handler = make_handler(
            handle, name=name, aliases=aliases, topic=topic, event_types=[Opened], where="app.handle"
        )
    except RegistrationError as refusal:
        assert "app.handle" in str(refusal)
    else:
        assert handler.names == aliases | {name}
        assert all(checked_name(each, "it") == each for each in handler.names)


@given(text.filter(lambda some: some.strip()))
def test_text_without_digits_is_not_a_duration(value: str) -> None:
    assume(not re.search(r"[0-9]", value))
    with pytest.raises(SettingsError):
        parse_duration(value)


def test_the_largest_numbers_of_python_are_refused_without_a_crash() -> None:
    for number in (10**400, -(10**400), math.inf, math.nan, 10**17):
        with pytest.raises(SettingsError):
            parse_duration(number)
