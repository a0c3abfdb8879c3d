"""The messages of a call by partition, and the batches that are made of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

from outboxio.errors import Unprocessable
from outboxio.integrations.brokers.relay import Parcel
from outboxio.integrations.kafka.client import murmur2

LARGEST_BATCH = 262_144  # bytes of a batch; a single larger message is a batch of its own
_LARGE = 16_384  # bytes of a body; headers and key of a message are shorter


@lru_cache(10_000)
def _hash(key: str) -> int:
    return int(murmur2(key.encode())) & 0x7FFFFFFF


class Pile:
    """The messages of a call to one partition, as places in the call. The pile is sent in batches, from its start."""

    def __init__(self, topic: str, partition: int, parcels: Sequence[Parcel]) -> None:
        self.topic = topic
        self.partition = partition
        self.places: list[int] = []
        self.batch: Any = None  # aiokafka's builder, from fill()
        self._parcels = parcels
        self._start = 0
        self._end = 0
        self._most = 0
        """The largest number of messages in a batch, while a message that is too large is looked for; else 0."""
        self._taken: list[int] = []

    @property
    def has_more(self) -> bool:
        """True if messages are still to be sent."""
        return self._start < len(self.places)

    @property
    def is_divisible(self) -> bool:
        """True if the last batch has several messages."""
        return len(self._taken) > 1

    @property
    def first(self) -> int:
        """The place of the last batch's first message."""
        return self._taken[0]

    def fill(
        self, batch: Any, failed: dict[str, Exception] | None, largest: int, verdicts: dict[int, Exception]
    ) -> bool:
        """Put the next messages into a batch; True if there are any.

        ``failed``, in an ordered relay, has the verdict of each key that has failed: the later messages of such a key
        are not sent.
        """
        self.batch, self._taken = batch, []
        end = self._start
        while end < len(self.places) and (not self._most or len(self._taken) < self._most):
            place = self.places[end]
            parcel = self._parcels[place]
            if failed and (verdict := failed.get(parcel.message.key)) is not None:
                verdicts[place] = verdict
            elif len(parcel.wire.body) > largest - _LARGE and (size := size_of(parcel)) > largest:
                verdicts[place] = verdict = too_large(parcel, size, largest)
                if failed is not None:
                    failed[parcel.message.key] = verdict
            else:
                if not self._append(parcel):
                    break
                self._taken.append(place)
            end += 1
        self._end = end
        batch.close()
        if not self._taken:
            self._start = end
        return bool(self._taken)

    def is_sent(self) -> None:
        """The broker has the last batch."""
        self._start = self._end

    def is_refused(self) -> list[int]:
        """The broker will not take the last batch, whose places are the result. The pile goes on behind the batch."""
        self._start, self._most = self._end, 0
        return self._taken

    def divide(self) -> None:
        """Try the last batch again, with half of its messages."""
        self._most = len(self._taken) // 2

    def _append(self, parcel: Parcel) -> bool:
        headers = [(name, value.encode()) for name, value in parcel.wire.headers.items()]
        headers.append(("content-type", parcel.wire.content_type.encode()))
        key = parcel.message.key.encode()
        return self.batch.append(timestamp=None, key=key, value=parcel.wire.body, headers=headers) is not None


def partitioned(
    parcels: Sequence[Parcel], partitions: Mapping[str, Sequence[int]], verdicts: Mapping[int, Exception]
) -> list[Pile]:
    """The messages without a verdict, by topic and partition. The key chooses the partition, as in Java's clients."""
    piles: dict[tuple[str, int], Pile] = {}
    for place, parcel in enumerate(parcels):
        if place in verdicts:
            continue
        topic = parcel.destination
        of_topic = partitions[topic]
        key = parcel.message.key
        # Java's hash is in Python here, 7 us for a key. The key of an event without a partition key is the event's id,
        # which no other record has: for this key a quick hash does.
        number = _hash(key) if "partitionkey" in parcel.message.attributes else crc32(key.encode())
        partition = of_topic[number % len(of_topic)]
        pile = piles.get((topic, partition))
        if pile is None:
            pile = piles[topic, partition] = Pile(topic, partition, parcels)
        pile.places.append(place)
    return list(piles.values())


def size_of(parcel: Parcel) -> int:
    """The bytes of a message in a batch, at most."""
    headers = sum(len(name) + len(value.encode()) + 10 for name, value in parcel.wire.headers.items())
    return len(parcel.wire.body) + len(parcel.message.key.encode()) + headers + 120


def too_large(parcel: Parcel, size: int, largest: int) -> Unprocessable:
    return Unprocessable(
        f"event {parcel.message.id} makes a message of {size} bytes, and the relay sends {largest} at most: give "
        "connect={'max_request_size': ...}, or store the large part elsewhere and send its address"
    )
