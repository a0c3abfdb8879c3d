from __future__ import annotations

from outboxio.support.scan_position import FairShare


def test_unknown_keys_share_a_batch_evenly() -> None:
    assert FairShare(1000).limits([f"k{i}" for i in range(10)]) == {f"k{i}": 100 for i in range(10)}


def test_every_key_may_read_at_least_one_row() -> None:
    assert FairShare(3).limits([f"k{i}" for i in range(10)]) == {f"k{i}": 1 for i in range(10)}


def test_a_busy_key_gets_the_share_of_quiet_keys() -> None:
    quotas, keys = FairShare(1000), [f"k{i}" for i in range(200)]
    quotas.learn(keys, found={"k0": 5, "k1": 2}, full=["k0"])

    limits = quotas.limits(keys)

    assert limits["k0"] == 1000
    assert limits["k1"] == 2 + 2 * 2
    assert {limits[key] for key in keys[2:]} == {2}


def test_a_quiet_key_that_fills_its_probe_is_busy_again() -> None:
    quotas, keys = FairShare(1000), ["a", "b"]
    quotas.learn(keys, found={"a": 500}, full=["a"])
    assert quotas.limits(keys) == {"a": 1000, "b": 250}
    quotas.learn(keys, found={"a": 1000, "b": 250}, full=["a", "b"])

    assert quotas.limits(keys) == {"a": 500, "b": 500}


def test_without_keys_the_limits_cover_all_known_keys() -> None:
    quotas = FairShare(1000)
    assert quotas.limits() == {}
    quotas.learn([], found={"a": 20, "b": 100}, full=["b"])

    assert quotas.limits() == {"a": 250 + 2 * 20, "b": 1000}


def test_a_key_under_steady_load_may_read_twice_as_many_rows() -> None:
    quotas, keys = FairShare(1000), ["a", "b"]
    quotas.learn(keys, found={"a": 400}, full=[])

    assert quotas.limits(keys) == {"a": 250 + 2 * 400, "b": 250}


def test_quiet_keys_together_may_read_about_one_batch() -> None:
    quotas, keys = FairShare(1000), ["a", "b", "c"]
    quotas.learn(keys, found={"a": 900, "b": 300}, full=[])

    limits = quotas.limits(keys)

    assert limits == {"a": 166 + 750, "b": 166 + 250, "c": 166}


def test_a_burst_of_one_hundred_fits_a_quiet_keys_probe() -> None:
    """A key that reaches its limit is read again."""
    quotas = FairShare(1000)
    quotas.learn([], found={"a": 20, "b": 20}, full=[])
    quotas.learn(["a", "b"], found={}, full=[])

    assert min(quotas.limits().values()) > 100


def test_only_the_last_round_counts() -> None:
    quotas = FairShare(1000)
    quotas.learn(["a"], found={"a": 400}, full=[])
    quotas.learn(["a"], found={}, full=[])

    assert quotas.limits(["a"]) == {"a": 500}
