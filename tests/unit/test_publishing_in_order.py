"""Publishing with ``ordered=True``: waves of messages, and the results of messages behind a failure."""

from collections.abc import Sequence
from datetime import UTC, datetime

from outboxio.errors import Unprocessable
from outboxio.integrations.brokers import Message, Wire
from outboxio.integrations.brokers.relay import DeliveryResult, Parcel, publish_in_order


def parcels(keys: str) -> list[Parcel]:
    """A message for each letter, which is its key; its id is its number."""
    return [Parcel(_message(key, number), Wire({}, b"", "text/plain"), "somewhere") for number, key in enumerate(keys)]


def _message(key: str, number: int) -> Message:
    when = datetime(2026, 1, 31, tzinfo=UTC)
    return Message(
        id=str(number), type="Noted", source="/", subject=None, key=key, time=when, data=b"{}", attributes={}
    )


class Broker:
    """Record the waves; fail the messages with these numbers, and accept all others."""

    def __init__(self, results: dict[int, Exception] | None = None) -> None:
        self.waves: list[list[int]] = []
        self._results = results or {}

    async def publish(self, wave: Sequence[Parcel]) -> list[DeliveryResult]:
        numbers = [int(parcel.message.id) for parcel in wave]
        self.waves.append(numbers)
        return [self._results.get(number) for number in numbers]


async def test_waves_have_each_key_once_and_keep_the_order_of_keys() -> None:
    broker = Broker()
    assert await publish_in_order(parcels("abacaab"), broker.publish) == [None] * 7
    assert broker.waves == [[0, 1, 3], [2, 6], [4], [5]]


async def test_nothing_is_published_for_no_messages() -> None:
    broker = Broker()
    assert await publish_in_order([], broker.publish) == []
    assert broker.waves == []


async def test_messages_behind_a_failure_of_their_key_get_its_result() -> None:
    full, too_large = RuntimeError("the stream is full"), Unprocessable("too large")
    broker = Broker({1: full, 2: too_large})
    results = await publish_in_order(parcels("abacaabb"), broker.publish)
    assert broker.waves == [[0, 1, 3], [2]]
    assert results == [None, full, too_large, None, too_large, too_large, full, full]
