"""Which keys a round of fan-out on MySQL claims from. Decided without a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from outboxio.model.event import EventRecord
from outboxio.storage.mysql.claim_plan import (
    BUSY_AFTER,
    MOST_AT_ONCE,
    MOST_GUESSED,
    SKIP_LOCKED_FOR,
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


def plan_after(*wanted: str, rounds: int = 1, ordered: bool = False) -> ClaimPlan:
    """A plan after rounds that have found events of the keys ``wanted``."""
    plan = ClaimPlan()
    plan.live = [live(name, ordered=ordered) for name in wanted]
    for _ in range(rounds):
        plan.claim([key(name, ordered=ordered) for name in wanted], request(), {}, PACKET)
        plan.ended(FOUND)
    return plan


# --- guesses -------------------------------------------------------------------------------------


def test_the_first_round_asks_the_server() -> None:
    assert not ClaimPlan().guess({}, None, expected=True)


def test_expected_events_are_guessed_where_events_were_last() -> None:
    plan = plan_after("A", "B")
    assert names(plan.guess({}, None, expected=True)) == ["A", "B"]


def test_without_expected_events_or_a_busy_time_the_server_is_asked() -> None:
    assert not plan_after("A").guess({}, None, expected=False)


def test_after_a_guess_of_expected_events_the_server_is_asked() -> None:
    plan = plan_after("A")
    assert [bool(plan.guess({}, None, expected=True)) for _ in range(3)] == [True, False, True]


def test_a_backlog_is_no_time_for_a_guess_of_expected_events() -> None:
    assert not plan_after("A").guess({"A": 7}, None, expected=True)


def test_in_a_busy_time_all_keys_are_claimed_from_round_after_round() -> None:
    plan = plan_after("A", rounds=BUSY_AFTER)
    plan.live = [live("A"), live("#money")]
    for _ in range(3):
        assert names(plan.guess({}, None, expected=False)) == ["A", "#money"]
        assert plan.is_enough(FOUND, None)


def test_a_busy_time_ends_with_a_round_that_finds_none() -> None:
    plan = plan_after("A", rounds=BUSY_AFTER)
    plan.ended(EMPTY)
    assert not plan.guess({}, None, expected=False)


def test_many_keys_are_guessed_only_behind_a_sequence() -> None:
    plan = plan_after(*(f"T{n}" for n in range(MOST_GUESSED + 1)), rounds=BUSY_AFTER)
    assert not plan.guess({}, None, expected=False)
    assert len(plan.guess({}, 7, expected=False)) == MOST_GUESSED + 1


def test_of_very_many_keys_none_are_guessed() -> None:
    plan = plan_after(*(f"T{n}" for n in range(MOST_AT_ONCE + 1)), rounds=BUSY_AFTER)
    assert not plan.guess({}, 7, expected=False)


def test_an_ordered_handler_ends_all_guesses() -> None:
    plan = plan_after("A", rounds=BUSY_AFTER, ordered=True)
    assert not plan.guess({}, None, expected=True)
    assert not plan.guess({}, 7, expected=True)


def test_a_guess_that_finds_none_is_enough_only_where_all_keys_were_read() -> None:
    plan = plan_after("A")
    plan.guess({}, 7, expected=False)
    assert plan.is_enough(EMPTY, 7)
    plan.guess({}, None, expected=True)
    assert not plan.is_enough(EMPTY, None)


def test_committed_events_are_taken_by_their_ids_every_second_round_at_most() -> None:
    plan = ClaimPlan()
    assert [plan.takes_committed(COMMITTED) for _ in range(4)] == [True, False, True, False]
    assert not plan.takes_committed([])


def test_a_round_that_asks_the_server_counts_as_the_round_between() -> None:
    plan = ClaimPlan()
    assert plan.takes_committed(COMMITTED)
    plan.claim([], request(), {}, PACKET)
    assert plan.takes_committed(COMMITTED)


def test_a_guessed_claim_reads_behind_the_sequence_of_the_key_or_of_all() -> None:
    claim = ClaimPlan().claim_guessed([key("A"), key("B")], request(after={"B": 9}, behind=7), PACKET)
    assert claim.after == {"A": 7, "B": 9}
    assert claim.looked_at == {"A", "B"}


# --- claims --------------------------------------------------------------------------------------


def claimed_from(plan: ClaimPlan, wanted: Sequence[Key], **options: Any) -> Claim:
    claim = plan.claim(wanted, request(options.pop("limits", None), **options), options.get("after", {}), PACKET)
    assert claim is not None
    return claim


def test_no_key_waits_no_claim() -> None:
    assert ClaimPlan().claim([key("A", ordered=True, waits=False)], request(), {}, PACKET) is None


def test_keys_without_a_limit_share_one_batch_and_types_come_before_topics() -> None:
    claim = claimed_from(ClaimPlan(), [key("#money"), key("A"), key("B")], limits={"B": 7})
    assert {key.name: size for key, size in claim.sizes.items()} == {"A": 50, "B": 7, "#money": 50}
    assert names(list(claim.sizes)) == ["A", "B", "#money"]


def test_a_claim_fits_into_one_message() -> None:
    claim = ClaimPlan().claim([key("A")], request(batch=10_000), {}, 100_000)
    assert claim is not None
    assert list(claim.sizes.values()) == [1000]


def test_if_one_ordered_key_waits_all_of_them_are_claimed_from_the_beginning() -> None:
    wanted = [key("A", ordered=True), key("B", ordered=True, waits=False), key("C")]
    claim = claimed_from(ClaimPlan(), wanted, after={"C": 7})
    assert sorted(names(list(claim.sizes))) == ["A", "B", "C"]
    assert names(claim.ordered) == ["A", "B"]
    assert claim.after == {}


def test_very_many_keys_take_turns() -> None:
    plan, wanted = ClaimPlan(), [key(f"T{n:03}") for n in range(2 * MOST_AT_ONCE + 1)]
    claims = [claimed_from(plan, wanted, limits={"T000": 10}) for _ in range(3)]
    assert names(list(claims[0].sizes)) == [f"T{n:03}" for n in range(MOST_AT_ONCE)]
    assert names(list(claims[1].sizes)) == [f"T{n:03}" for n in range(MOST_AT_ONCE, 2 * MOST_AT_ONCE)]
    assert "T000" in names(list(claims[2].sizes)), "behind the last key comes the first"
    assert next(iter(claims[0].sizes.values())) == 10 * len(wanted) // MOST_AT_ONCE, (
        "a limit covers the turns of others"
    )
    assert claims[0].left_out == {f"T{n:03}" for n in range(MOST_AT_ONCE, len(wanted))}


def test_locked_events_are_skipped_where_the_server_must_wait_and_for_a_while_after_a_refusal() -> None:
    plan, claim, ordered = ClaimPlan(), Claim({key("A"): 1}), Claim({}, ordered=[key("A", ordered=True)])
    assert plan.skips_locked(claim, 0.0, can_refuse_to_wait=False)
    assert plan.skips_locked(ordered, 0.0, can_refuse_to_wait=True)
    assert not plan.skips_locked(claim, 0.0, can_refuse_to_wait=True)
    plan.met_locked(0.0)
    assert plan.skips_locked(claim, SKIP_LOCKED_FOR - 1, can_refuse_to_wait=True)
    assert not plan.skips_locked(claim, SKIP_LOCKED_FOR, can_refuse_to_wait=True)


# --- found events --------------------------------------------------------------------------------


def ids(claim: Claim, text: str | None, *wanted: LiveSubscription) -> dict[str, list[str]]:
    return {key.name: list(some) for key, some in claim.share_out(text, wanted).ids.items()}


def test_an_event_that_two_keys_have_is_taken_once() -> None:
    claim = Claim({key("A"): 9, key("#money"): 9})
    assert ids(claim, "0 1 x,1 1 x,1 2 y", live("A"), live("#money")) == {"A": ["x"], "#money": ["y"]}


def test_an_event_of_an_ordered_key_is_left_to_that_key() -> None:
    claim = Claim({key("A"): 9, key("#money", ordered=True): 9}, ordered=[key("#money", ordered=True)])
    taken = claim.share_out("0 1 -x,0 2 y", [live("A"), live("#money", ordered=True)])
    assert {key.name: some for key, some in taken.ids.items()} == {"A": ["y"]}
    assert taken.full == {"A"}, "the event is still to be made by the ordered key"


def test_ordered_keys_advance_together() -> None:
    ordered = [key("A", ordered=True), key("B", ordered=True)]
    claim = Claim(dict.fromkeys(ordered, 2), ordered=ordered)
    taken = claim.share_out("0 1 a,0 4 b,1 3 c,1 5 d", [live("A", ordered=True), live("B", ordered=True)])
    assert {key.name: some for key, some in taken.ids.items()} == {"A": ["a", "b"], "B": ["c"]}
    assert taken.full == {"A", "B"}
    assert taken.reached == {}


def test_keys_without_order_report_how_far_they_were_read() -> None:
    claim = Claim({key("A"): 2, key("B"): 9})
    taken = claim.share_out("0 3 b,0 2 a,1 9 c", [live("A"), live("B")])
    assert taken.reached == {"A": 3, "B": 9}
    assert taken.full == {"A"}


def test_a_key_that_is_wanted_no_more_is_not_taken() -> None:
    assert ids(Claim({key("A"): 9, key("B"): 9}), "0 1 x,1 2 y", live("B")) == {"B": ["y"]}


def test_an_ordered_handler_that_has_just_come_stops_the_round() -> None:
    taken = Claim({key("A"): 9}).share_out("0 1 x", [live("A", ordered=True)])
    assert (taken.ids, taken.full) == ({}, {"A"})


def test_nothing_found_is_nothing_taken() -> None:
    claim = Claim({key("A"): 9}, looked_at=frozenset({"A"}))
    taken = claim.share_out(None, [live("A")])
    assert claim.result(taken, 0) == FanoutResult({}, frozenset(), 0, {}, frozenset({"A"}))


def test_keys_whose_turn_is_still_to_come_count_as_full() -> None:
    claim = Claim({key("A"): 9}, looked_at=frozenset({"A"}), left_out=frozenset({"B"}))
    done = claim.result(claim.share_out("0 1 x", [live("A"), live("B")]), 1)
    assert done == FanoutResult({"A": 1}, frozenset({"B"}), 1, looked_at=frozenset({"A"}))


# --- subscriptions -------------------------------------------------------------------------------


def row(handler: str, aliases: str, seen: str) -> tuple[str]:
    return (f'["{handler}","A","",0,0,"{aliases}","{seen}",1]',)


def test_an_alias_of_a_live_handler_gets_no_new_notifications() -> None:
    found = subscribed([row("new", '[\\"old\\"]', "2030-01-02"), row("old", "[]", "2030-01-03")])
    assert [s.handler_name for s in found] == ["new"]


def test_of_two_names_that_are_aliases_of_each_other_the_one_seen_later_counts() -> None:
    found = subscribed([row("a", '[\\"b\\"]', "2030-01-02"), row("b", '[\\"a\\"]', "2030-01-03")])
    assert [s.handler_name for s in found] == ["b"]


def test_of_committed_events_the_type_goes_before_the_topic() -> None:
    both, by_topic, unwanted = (
        EventRecord(id=uuid4(), event_type="A", topic="money"),
        EventRecord(id=uuid4(), event_type="B", topic="money"),
        EventRecord(id=uuid4(), event_type="C"),
    )
    found = keys_of([both, by_topic, unwanted], [live("A"), live("#money")])
    assert found == {str(both.id): "A", str(by_topic.id): "#money"}
