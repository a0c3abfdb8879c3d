"""Shares of the transactions, after any sequence of acquisitions and releases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outboxio.runs.transaction_shares import Shares


@given(
    total=st.integers(1, 12), handlers=st.integers(0, 6), hooks=st.integers(0, 6),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=80),
)  # fmt: skip
def test_the_first_waiter_never_waits_for_an_idle_kind(
    total: int, handlers: int, hooks: int, steps: list[tuple[bool, int]]
) -> None:
    """After any sequence: no more transactions are in use than exist, and neither kind can have all of them."""
    shares = Shares(total, handlers=handlers, hooks=hooks)
    of_handlers = [shares.of_handler() for _ in range(handlers)]
    of_hooks = [shares.of_hook(is_expected=True) for _ in range(hooks)]
    claims = of_handlers + of_hooks
    for takes, number in steps if claims else []:
        claim = claims[number % len(claims)]
        if takes:
            shares.take(claim)
        elif claim.taken:
            shares.release(claim)
        out = sum(claim.taken for claim in claims)
        assert out <= (max(total, 2) if handlers and hooks else total)
        for kind in (of_handlers, of_hooks):
            if kind and not any(claim.taken for claim in kind):
                assert shares.may_take(kind[0])
    while out := [claim for claim in claims if claim.taken]:
        shares.release(out[0])
    for claim in claims:
        assert shares.take(claim)
        shares.release(claim)
