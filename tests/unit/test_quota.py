from __future__ import annotations

from outboxio.quota import Quotas


def test_keys_share_a_batch_until_more_is_known_of_them() -> None:
    assert Quotas(1000).rooms([f"k{i}" for i in range(10)]) == {f"k{i}": 100 for i in range(10)}


def test_every_key_has_room_for_one_at_least() -> None:
    assert Quotas(3).rooms([f"k{i}" for i in range(10)]) == {f"k{i}": 1 for i in range(10)}


def test_a_busy_key_gets_what_the_quiet_ones_do_not_need() -> None:
    quotas, keys = Quotas(1000), [f"k{i}" for i in range(200)]
    quotas.learn(keys, found=["k0", "k1"], full=["k0"])

    rooms = quotas.rooms(keys)

    assert rooms["k0"] == 1000
    assert {rooms[key] for key in keys[1:]} == {1}


def test_a_quiet_key_that_fills_its_probe_is_busy_again() -> None:
    quotas, keys = Quotas(1000), ["a", "b"]
    quotas.learn(keys, found=["a"], full=["a"])
    assert quotas.rooms(keys) == {"a": 1000, "b": 50}
    quotas.learn(keys, found=["a", "b"], full=["a", "b"])

    assert quotas.rooms(keys) == {"a": 500, "b": 500}


def test_without_names_it_speaks_of_the_keys_that_were_ever_found() -> None:
    quotas = Quotas(1000)
    assert quotas.rooms() == {}
    quotas.learn([], found=["a", "b"], full=["b"])

    assert quotas.rooms() == {"a": 50, "b": 1000}
