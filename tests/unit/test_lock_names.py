from __future__ import annotations

from itertools import product

from outboxio.model.lock_name import LockName, channel_name


def every_name(alphabet: list[str]) -> list[LockName]:
    return [
        *(LockName(namespace, "fanout") for namespace in alphabet),
        *(LockName(namespace, "dispatch", handler) for namespace, handler in product(alphabet, alphabet)),
    ]


AWKWARD = ["a", "b", "a/b", "/", "a/", "/a", "a/dispatch", "dispatch/a", "fanout", "a/fanout", "a/dispatch/b", "A", "à"]


def test_every_lock_has_its_own_lease_key_and_text() -> None:
    names = every_name([*AWKWARD, "x" * 255, "x" * 254 + "y", "😀" * 255])
    for of in (lambda n: n.lease, lambda n: n.key, lambda n: n.text, lambda n: n.digest):
        assert len({of(name) for name in names}) == len(names)


def test_lock_names_fit_their_columns() -> None:
    for name in every_name(["a", "x" * 255, "😀" * 255]):
        assert len(name.lease) <= 255
        assert -(2**63) <= name.key < 2**63
        assert len(name.text) <= 64
        assert name.text.isascii()


def test_a_lease_name_is_readable() -> None:
    assert LockName("wallets", "fanout").lease == "wallets/fanout"
    assert LockName("wallets", "dispatch", "deposit-receipt").lease == "wallets/dispatch/deposit-receipt"
    assert LockName("wallets", "dispatch", "x" * 255).lease.startswith("wallets/dispatch/xxx")


def test_lock_names_do_not_change_between_versions() -> None:
    """During a rolling deploy old and new instances must use the same lock."""
    name = LockName("wallets", "dispatch", "deposit-receipt")
    assert name.key == -7081025485438255801
    assert name.text == "outboxio-9dbb24d67ef6fd47477902f72d21f5ae8db64574650820b4"
    assert channel_name("wallets") == "outboxio_4085118690b6b24a58e8b9a2e26a15a3"


def test_a_channel_is_an_identifier_of_its_namespace() -> None:
    channels = {channel_name(namespace) for namespace in AWKWARD}
    assert len(channels) == len(AWKWARD)
    assert all(channel.isidentifier() and channel.isascii() and len(channel) <= 63 for channel in channels)
