from __future__ import annotations

import random

from outboxio.quota import Quotas


def test_at_first_all_keys_share_the_batch() -> None:
    assert Quotas(1000).rooms(["a", "b", "c", "d"]) == dict.fromkeys("abcd", 250)


def test_without_keys_those_are_meant_that_ever_had_something() -> None:
    quotas = Quotas(1000)
    assert quotas.rooms() == {}
    quotas.learn(["a", "b"], found=["a"], full=["a"])
    quotas.learn([], found=["c"], full=[])
    assert set(quotas.rooms()) == {"a", "c"}


def test_a_key_that_fills_its_room_gets_nearly_the_whole_batch_and_the_quiet_are_probed() -> None:
    keys = [f"k{n}" for n in range(200)]
    quotas = Quotas(1000)
    quotas.learn(keys, found=["k7"], full=["k7"])
    rooms = quotas.rooms(keys)
    assert rooms.pop("k7") == 1000
    assert set(rooms.values()) == {1}


def test_a_key_that_was_quiet_shares_again_once_it_fills_its_room() -> None:
    quotas = Quotas(100)
    quotas.learn(["a", "b"], found=["a"], full=["a"])
    assert quotas.rooms(["a", "b"]) == {"a": 100, "b": 5}
    quotas.learn(["a", "b"], found=["a", "b"], full=["a", "b"])
    assert quotas.rooms(["a", "b"]) == {"a": 50, "b": 50}


def test_no_key_is_ever_left_without_room_and_a_round_stays_near_one_batch() -> None:
    chance = random.Random(7)
    for _ in range(300):
        batch = chance.choice([1, 2, 10, 1000])
        keys = [f"k{n}" for n in range(chance.randrange(1, 300))]
        quotas = Quotas(batch)
        for _ in range(5):
            asked = chance.sample(keys, chance.randrange(1, len(keys) + 1))
            rooms = quotas.rooms(asked)
            assert set(rooms) == set(asked)
            assert min(rooms.values()) >= 1
            assert max(rooms.values()) <= batch
            assert sum(rooms.values()) <= batch * 1.1 + len(asked)
            found = chance.sample(asked, chance.randrange(len(asked) + 1))
            quotas.learn(asked, found, chance.sample(found, chance.randrange(len(found) + 1)))


def test_what_is_learnt_does_not_depend_on_the_order_of_keys() -> None:
    first, second = Quotas(100), Quotas(100)
    keys = list("abcdef")
    first.learn(keys, ["a", "b"], ["b"])
    second.learn(keys[::-1], ["b", "a"], ["b"])
    assert first.rooms(keys) == second.rooms(keys[::-1])
