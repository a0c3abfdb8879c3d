from __future__ import annotations

from datetime import timedelta

import pytest

from outboxio import ConfigurationError, Retry, SettingsError, StaleRecord
from outboxio.model.action import RetryCounter, as_entries, cause_chain


class Root(Exception):
    pass


class Leaf(Root):
    pass


class Other(Exception):
    pass


def never(error: BaseException) -> None:
    return None


def raised_from(error: BaseException, *causes: BaseException) -> BaseException:
    current = error
    for cause in causes:
        current.__cause__ = cause
        current = cause
    return error


# --- what matches -----------------------------------------------------------------------------------------


def test_a_cyclic_cause_chain_is_followed_once() -> None:
    first, second, third = Root(), Other(), Leaf()
    assert list(cause_chain(first)) == [first]
    assert list(cause_chain(raised_from(first, second, third))) == [first, second, third]
    third.__cause__ = second
    assert list(cause_chain(first)) == [first, second, third]
    second.__cause__ = second
    assert list(cause_chain(first)) == [first, second]


def test_subclasses_and_causes_match_but_contexts_and_superclasses_do_not() -> None:
    retry = Retry(on=Root)
    assert retry.matches(Root())
    assert retry.matches(Leaf())
    assert retry.matches(raised_from(Other(), ValueError(), Leaf()))
    assert not retry.matches(Other())
    assert not Retry(on=Leaf).matches(Root())
    with_context = Other()
    with_context.__context__ = Root()
    assert not retry.matches(with_context)
    assert not retry.matches(ExceptionGroup("several", [Root()]))


def test_one_entry_may_name_several_classes() -> None:
    retry = Retry(on=(Leaf, Other))
    assert retry.matches(Leaf())
    assert retry.matches(Other())
    assert not retry.matches(Root())


# --- how often, and when ------------------------------------------------------------------------------------


def test_attempts_count_every_run() -> None:
    for attempts in range(1, 6):
        counter = RetryCounter([Retry(on=Root, attempts=attempts)], never)
        delays = [counter.delay_after(Root()) for _ in range(attempts)]
        assert [delay is not None for delay in delays] == [True] * (attempts - 1) + [False]


def test_each_retry_entry_has_its_own_count() -> None:
    counter = RetryCounter([Retry(on=Root, attempts=3), Retry(on=Other, attempts=2)], never)
    errors: list[BaseException] = [Root(), Other(), Leaf(), Root()]
    assert [counter.delay_after(error) is not None for error in errors] == [True, True, True, False]
    counter = RetryCounter([Retry(on=Root, attempts=3), Retry(on=Other, attempts=2)], never)
    errors = [Other(), Root(), Other()]
    assert [counter.delay_after(error) is not None for error in errors] == [True, True, False]


def test_the_first_entry_that_matches_decides() -> None:
    counter = RetryCounter([Retry(on=Leaf, attempts=1), Retry(on=Root, attempts=9)], lambda error: Retry(on=Root))
    assert counter.delay_after(Leaf()) is None
    assert counter.delay_after(Root()) is not None


def test_unlisted_errors_use_the_default_retry_or_none() -> None:
    by_default = Retry(on=Other, attempts=2)
    counter = RetryCounter([], lambda error: by_default if isinstance(error, Other) else None)
    assert counter.delay_after(Root()) is None
    assert counter.delay_after(Other()) is not None
    assert counter.delay_after(Other()) is None


def test_the_wait_doubles_with_jitter_up_to_a_limit() -> None:
    seen: list[set[bool]] = [set() for _ in range(12)]
    for _ in range(200):
        counter = RetryCounter([Retry(on=Root, attempts=99, delay="100ms")], never)
        for n, sides in enumerate(seen):
            delay = counter.delay_after(Root())
            expected = min(0.1 * 2**n, 10)
            assert delay is not None
            assert expected * 0.75 <= delay <= expected * 1.25
            sides.add(delay < expected)
    assert all(sides == {True, False} for sides in seen)


def test_a_delay_of_zero_means_no_wait() -> None:
    counter = RetryCounter([Retry(on=Root, attempts=3, delay=0)], never)  # type: ignore[arg-type]
    assert counter.delay_after(Root()) == 0


# --- what can be written --------------------------------------------------------------------------------------


def test_a_delay_is_parsed_like_any_duration() -> None:
    for spelling in ("20ms", 0.02, "PT0.02S", timedelta(milliseconds=20)):
        assert Retry(on=Root, delay=spelling).delay == timedelta(milliseconds=20)  # type: ignore[arg-type]


@pytest.mark.parametrize("on", ["Root", [Root], None, int, (Root, int), Root(), ((Root,),)])
def test_only_exception_classes_can_be_retried(on: object) -> None:
    with pytest.raises(SettingsError, match=r"Retry\.on = .*: expected an exception class, or a tuple of them"):
        Retry(on=on)  # type: ignore[arg-type]


@pytest.mark.parametrize("attempts", [0, -1])
def test_attempts_are_one_or_more(attempts: int) -> None:
    with pytest.raises(SettingsError, match=rf"Retry\.attempts = {attempts}: expected 1 or more"):
        Retry(on=Root, attempts=attempts)


def test_a_single_entry_equals_a_sequence_of_one() -> None:
    retry = Retry(on=Root)
    assert as_entries(retry) == as_entries([retry]) == (retry,)
    assert as_entries(()) == ()


def test_a_stale_record_error_names_what_is_known() -> None:
    assert str(StaleRecord("Wallet", 7, version=3)) == "Wallet 7 is no longer at version 3, or does not exist"
    assert str(StaleRecord("Wallet", 7)) == "Wallet 7 has changed since it was read, or does not exist"
    assert str(StaleRecord("Wallet")) == "Wallet has changed since it was read, or does not exist"


@pytest.mark.parametrize("retry", [7, "x", [ValueError], None, ValueError], ids=ascii)
def test_an_invalid_retry_is_refused_before_the_action_starts(retry: object) -> None:
    with pytest.raises(ConfigurationError, match="expected a Retry, or a list of them"):
        as_entries(retry)  # type: ignore[arg-type]


def test_many_retries_do_not_overflow_the_wait() -> None:
    counter = RetryCounter([Retry(on=ValueError, attempts=3000, delay="1ms")], lambda error: None)
    assert max(counter.delay_after(ValueError()) or 0 for _ in range(2999)) <= 12.5
