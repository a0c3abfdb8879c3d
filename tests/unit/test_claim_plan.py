"""Which keys a round of fan-out on MySQL claims events from. Uses no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from outboxio.model.event import EventRecord
from outboxio.storage.mysql.claim_plan import (
    BUSY_AFTER,
    MAX_GUESSED,
    MAX_KEYS_PER_CLAIM,
    SKIP_LOCKED_SECONDS,
    Claim,
    ClaimPlan,
    Key,
    LiveSubscription,
    keys_of,
    subscribed,
)
from outboxio.storage.protocols import FanoutRequest, FanoutResult

NOW = datetime(2030, 1, 1)
PACKET = 16 * 2**20
FOUND, EMPTY = FanoutResult({"A": 1}, frozenset(), 1), FanoutResult({}, frozenset(), 0)
COMMITTED = [EventRecord(id=uuid4(), event_type="A")]


def request(limits: Mapping[str, int] | None = None, batch: int = 100, **scan: Any) -> FanoutRequest:
    return FanoutRequest("app", NOW, NOW, limits or {}, batch, **scan)


def key(name: str, *, ordered: bool = False, waits: bool = True) -> Key:
    return Key("#" if name.startswith("#") else "", name.removeprefix("#"), ordered, waits)


def live(name: str, *, handler: str = "h", ordered: bool = False, aliases: str = "[]") -> LiveSubscription:
    topic = name[1:] if name.startswith("#") else ""
    return LiveSubscription(handler, "" if topic else name, topic, 0, int(ordered), aliases, "2030-01-01", 1)


def names(keys: Sequence[Key]) -> list[str]:
    return [key.name for key in keys]


def plan_after(*keys: str, rounds: int = 1, ordered: bool = False) -> ClaimPlan:
    """Return a plan after rounds that found events of ``keys``."""
    plan = ClaimPlan()
    plan.live = [live(name, ordered=ordered) for name in keys]
    for _ in range(rounds):
        plan.claim([key(name, ordered=ordered) for name in keys], request(), {}, PACKET)
        plan.ended(FOUND)
    return plan


# --- guesses -------------------------------------------------------------------------------------


def test_the_first_round_queries_the_server() -> None:
    assert not ClaimPlan().guess({}, None, expected=True)


def test_expected_events_are_guessed_for_the_last_keys() -> None:
    plan = plan_after("A", "B")
    assert names(plan.guess({}, None, expected=True)) == ["A", "B"]


def test_an_idle_round_without_expected_events_queries_the_server() -> None:
    assert not plan_after("A").guess({}, None, expected=False)


def test_the_round_after_a_guess_queries_the_server() -> None:
    plan = plan_after("A")
    assert [bool(plan.guess({}, None, expected=True)) for _ in range(3)] == [True, False, True]


def test_expected_events_are_not_guessed_during_a_backlog() -> None:
    assert not plan_after("A").guess({"A": 7}, None, expected=True)


def test_consecutive_rounds_with_events_claim_from_all_keys() -> None:
    plan = plan_after("A", rounds=BUSY_AFTER)
    plan.live = [live("A"), live("#money")]
    for _ in range(3):
        assert names(plan.guess({}, None, expected=False)) == ["A", "#money"]
        assert plan.is_enough(FOUND, None)


def test_an_empty_round_ends_the_guessing() -> None:
    plan = plan_after("A", rounds=BUSY_AFTER)
    plan.ended(EMPTY)
    assert not plan.guess({}, None, expected=False)


def test_many_keys_are_only_guessed_after_a_sequence() -> None:
    plan = plan_after(*(f"T{n}" for n in range(MAX_GUESSED + 1)), rounds=BUSY_AFTER)
    assert not plan.guess({}, None, expected=False)
    assert len(plan.guess({}, 7, expected=False)) == MAX_GUESSED + 1


def test_too_many_keys_are_not_guessed() -> None:
    plan = plan_after(*(f"T{n}" for n in range(MAX_KEYS_PER_CLAIM + 1)), rounds=BUSY_AFTER)
    assert not plan.guess({}, 7, expected=False)


def test_an_ordered_handler_prevents_guessing() -> None:
    plan = plan_after("A", rounds=BUSY_AFTER, ordered=True)
    assert not plan.guess({}, None, expected=True)
    assert not plan.guess({}, 7, expected=True)


def test_an_empty_guess_is_enough_if_all_keys_were_read() -> None:
    plan = plan_after("A")
    plan.guess({}, 7, expected=False)
    assert plan.is_enough(EMPTY, 7)
    plan.guess({}, None, expected=True)
    assert not plan.is_enough(EMPTY, None)


def test_committed_events_are_taken_by_id_at_most_every_second_round() -> None:
    plan = ClaimPlan()
    assert [plan.takes_committed(COMMITTED) for _ in range(4)] == [True, False, True, False]
    assert not plan.takes_committed([])


def test_a_round_that_queries_the_server_counts_as_the_other_round() -> None:
    plan = ClaimPlan()
    assert plan.takes_committed(COMMITTED)
    plan.claim([], request(), {}, PACKET)
    assert plan.takes_committed(COMMITTED)


def test_a_guessed_claim_reads_after_the_sequence() -> None:
    claim = ClaimPlan().claim_guessed([key("A"), key("B")], request(after={"B": 9}, behind=7), PACKET)
    assert claim.after == {"A": 7, "B": 9}
    assert claim.looked_at == {"A", "B"}


# --- claims --------------------------------------------------------------------------------------


def claimed_from(plan: ClaimPlan, keys: Sequence[Key], **options: Any) -> Claim:
    claim = plan.claim(keys, request(options.pop("limits", None), **options), options.get("after", {}), PACKET)
    assert claim is not None
    return claim


def test_there_is_no_claim_without_undelivered_events() -> None:
    assert ClaimPlan().claim([key("A", ordered=True, waits=False)], request(), {}, PACKET) is None


def test_keys_without_a_limit_share_a_batch_types_first() -> None:
    claim = claimed_from(ClaimPlan(), [key("#money"), key("A"), key("B")], limits={"B": 7})
    assert {key.name: size for key, size in claim.sizes.items()} == {"A": 50, "B": 7, "#money": 50}
    assert names(list(claim.sizes)) == ["A", "B", "#money"]


def test_a_claim_fits_into_one_message() -> None:
    claim = ClaimPlan().claim([key("A")], request(batch=10_000), {}, 100_000)
    assert claim is not None
    assert list(claim.sizes.values()) == [1000]


def test_all_ordered_keys_are_claimed_together() -> None:
    keys = [key("A", ordered=True), key("B", ordered=True, waits=False), key("C")]
    claim = claimed_from(ClaimPlan(), keys, after={"C": 7})
    assert sorted(names(list(claim.sizes))) == ["A", "B", "C"]
    assert names(claim.ordered) == ["A", "B"]
    assert claim.after == {}


def test_too_many_keys_are_claimed_in_rotation() -> None:
    plan, keys = ClaimPlan(), [key(f"T{n:03}") for n in range(2 * MAX_KEYS_PER_CLAIM + 1)]
    claims = [claimed_from(plan, keys, limits={"T000": 10}) for _ in range(3)]
    assert names(list(claims[0].sizes)) == [f"T{n:03}" for n in range(MAX_KEYS_PER_CLAIM)]
    assert names(list(claims[1].sizes)) == [f"T{n:03}" for n in range(MAX_KEYS_PER_CLAIM, 2 * MAX_KEYS_PER_CLAIM)]
    assert "T000" in names(list(claims[2].sizes)), "the first key follows the last"
    assert next(iter(claims[0].sizes.values())) == 10 * len(keys) // MAX_KEYS_PER_CLAIM, (
        "the limit includes the skipped rounds"
    )
    assert claims[0].left_out == {f"T{n:03}" for n in range(MAX_KEYS_PER_CLAIM, len(keys))}


def test_locked_events_are_skipped_on_mysql_and_after_a_lock_failure() -> None:
    plan, claim, ordered = ClaimPlan(), Claim({key("A"): 1}), Claim({}, ordered=[key("A", ordered=True)])
    assert plan.skips_locked(claim, 0.0, can_refuse_to_wait=False)
    assert plan.skips_locked(ordered, 0.0, can_refuse_to_wait=True)
    assert not plan.skips_locked(claim, 0.0, can_refuse_to_wait=True)
    plan.met_locked(0.0)
    assert plan.skips_locked(claim, SKIP_LOCKED_SECONDS - 1, can_refuse_to_wait=True)
    assert not plan.skips_locked(claim, SKIP_LOCKED_SECONDS, can_refuse_to_wait=True)


# --- found events --------------------------------------------------------------------------------


def ids(claim: Claim, text: str | None, *subscriptions: LiveSubscription) -> dict[str, list[str]]:
    return {key.name: list(some) for key, some in claim.select_events(text, subscriptions).ids.items()}


def test_an_event_of_two_keys_is_taken_once() -> None:
    claim = Claim({key("A"): 9, key("#money"): 9})
    assert ids(claim, "0 1 x,1 1 x,1 2 y", live("A"), live("#money")) == {"A": ["x"], "#money": ["y"]}


def test_an_event_of_an_ordered_key_is_taken_by_that_key() -> None:
    claim = Claim({key("A"): 9, key("#money", ordered=True): 9}, ordered=[key("#money", ordered=True)])
    taken = claim.select_events("0 1 -x,0 2 y", [live("A"), live("#money", ordered=True)])
    assert {key.name: some for key, some in taken.ids.items()} == {"A": ["y"]}
    assert taken.full == {"A"}, "the ordered key will take the event"


def test_ordered_keys_advance_together() -> None:
    ordered = [key("A", ordered=True), key("B", ordered=True)]
    claim = Claim(dict.fromkeys(ordered, 2), ordered=ordered)
    taken = claim.select_events("0 1 a,0 4 b,1 3 c,1 5 d", [live("A", ordered=True), live("B", ordered=True)])
    assert {key.name: some for key, some in taken.ids.items()} == {"A": ["a", "b"], "B": ["c"]}
    assert taken.full == {"A", "B"}
    assert taken.reached == {}


def test_unordered_keys_report_their_position() -> None:
    claim = Claim({key("A"): 2, key("B"): 9})
    taken = claim.select_events("0 3 b,0 2 a,1 9 c", [live("A"), live("B")])
    assert taken.reached == {"A": 3, "B": 9}
    assert taken.full == {"A"}


def test_a_key_without_a_subscription_is_not_taken() -> None:
    assert ids(Claim({key("A"): 9, key("B"): 9}), "0 1 x,1 2 y", live("B")) == {"B": ["y"]}


def test_a_new_ordered_handler_stops_the_round() -> None:
    taken = Claim({key("A"): 9}).select_events("0 1 x", [live("A", ordered=True)])
    assert (taken.ids, taken.full) == ({}, {"A"})


def test_an_empty_claim_takes_nothing() -> None:
    claim = Claim({key("A"): 9}, looked_at=frozenset({"A"}))
    taken = claim.select_events(None, [live("A")])
    assert claim.result(taken, 0) == FanoutResult({}, frozenset(), 0, {}, frozenset({"A"}))


def test_skipped_keys_count_as_full() -> None:
    claim = Claim({key("A"): 9}, looked_at=frozenset({"A"}), left_out=frozenset({"B"}))
    done = claim.result(claim.select_events("0 1 x", [live("A"), live("B")]), 1)
    assert done == FanoutResult({"A": 1}, frozenset({"B"}), 1, looked_at=frozenset({"A"}))


# --- subscriptions -------------------------------------------------------------------------------


def row(handler: str, aliases: str, seen: str) -> tuple[str]:
    return (f'["{handler}","A","",0,0,"{aliases}","{seen}",1]',)


def test_an_alias_of_a_live_handler_gets_no_new_notifications() -> None:
    found = subscribed([row("new", '[\\"old\\"]', "2030-01-02"), row("old", "[]", "2030-01-03")])
    assert [s.handler_name for s in found] == ["new"]


def test_of_mutual_aliases_the_one_seen_last_counts() -> None:
    found = subscribed([row("a", '[\\"b\\"]', "2030-01-02"), row("b", '[\\"a\\"]', "2030-01-03")])
    assert [s.handler_name for s in found] == ["b"]


def test_the_type_of_a_committed_event_precedes_its_topic() -> None:
    both, by_topic, unsubscribed = (
        EventRecord(id=uuid4(), event_type="A", topic="money"),
        EventRecord(id=uuid4(), event_type="B", topic="money"),
        EventRecord(id=uuid4(), event_type="C"),
    )
    found = keys_of([both, by_topic, unsubscribed], [live("A"), live("#money")])
    assert found == {str(both.id): "A", str(by_topic.id): "#money"}
