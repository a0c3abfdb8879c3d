"""The batches of a relay for one partition: complete, in order, and without oversized messages."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from outboxio.integrations.brokers import Message, Parcel, Wire
from outboxio.integrations.brokers.kafka_client import Pile, partitioned

LARGEST = 1_000_000


class Builder:
    """Takes a number of messages."""

    def __init__(self, room: int = 1000) -> None:
        self.keys: list[str] = []
        self._room = room

    def append(self, *, key: bytes, **parts: Any) -> object | None:
        if len(self.keys) == self._room:
            return None
        self.keys.append(key.decode())
        return object()

    def close(self) -> None:
        self._room = 0


def parcel(key: str, size: int = 10) -> Parcel:
    message = Message(
        id=key, type="T", source="/app", subject=key, key=key, time=datetime(2026, 1, 1), data=b"", attributes={}
    )
    return Parcel(message, Wire({}, b"x" * size), "topic")


def pile_of(parcels: list[Parcel]) -> Pile:
    [pile] = partitioned(parcels, {"topic": [0]}, {})
    return pile


def sent(pile: Pile, broken: set[str], room: int = 1000, failed: dict[str, Exception] | None = None) -> list[list[str]]:
    """Send a pile to a broker that refuses batches with a broken message as too large; the batches that were stored."""
    stored: list[list[str]] = []
    refused: list[str] = []
    while pile.has_more:
        batch = Builder(room)
        if not pile.fill(batch, failed, LARGEST, {}):
            continue
        if not broken & set(batch.keys):
            stored.append(batch.keys)
            pile.is_sent()
        elif pile.is_divisible:
            pile.divide()
        else:
            refused += batch.keys
            pile.is_refused()
    assert set(refused) == broken
    return stored


def test_a_group_larger_than_a_batch_is_sent_in_order() -> None:
    keys = [f"k{i}" for i in range(25)]
    assert sent(pile_of([parcel(key) for key in keys]), set(), room=10) == [keys[:10], keys[10:20], keys[20:]]


def test_only_the_message_too_large_for_the_broker_is_refused() -> None:
    keys = [f"k{i}" for i in range(500)]
    stored = sent(pile_of([parcel(key) for key in keys]), {"k0", "k137", "k499"})
    assert [key for batch in stored for key in batch] == [key for key in keys if key not in {"k0", "k137", "k499"}]


def test_later_messages_of_a_failed_key_get_its_delivery_result() -> None:
    results: dict[int, Exception] = {}
    error = RuntimeError()
    pile, batch = pile_of([parcel("a"), parcel("b"), parcel("a")]), Builder()
    assert pile.fill(batch, {"a": error}, LARGEST, results)
    assert batch.keys == ["b"]
    assert results == {0: error, 2: error}


def test_a_message_larger_than_a_request_is_reported_before_sending() -> None:
    results: dict[int, Exception] = {}
    pile, batch = pile_of([parcel("a", LARGEST), parcel("b")]), Builder()
    assert pile.fill(batch, None, LARGEST, results)
    assert batch.keys == ["b"]
    assert str(LARGEST) in str(results[0])


def test_a_group_with_nothing_left_to_send_is_finished() -> None:
    results: dict[int, Exception] = {}
    pile = pile_of([parcel("a", LARGEST)])
    assert not pile.fill(Builder(), None, LARGEST, results)
    assert not pile.has_more
