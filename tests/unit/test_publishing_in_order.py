"""Publishing with ``ordered=True``: waves of messages, and the verdicts of messages behind a failure."""

from collections.abc import Sequence
from datetime import UTC, datetime

from outboxio.errors import Unprocessable
from outboxio.integrations.brokers import Message, Wire
from outboxio.integrations.brokers.relay import Parcel, Verdict, publish_in_order


def parcels(keys: str) -> list[Parcel]:
    """A message for each letter, which is the message's key; the message's id is the place."""
    return [Parcel(_message(key, place), Wire({}, b"", "text/plain"), "somewhere") for place, key in enumerate(keys)]


def _message(key: str, place: int) -> Message:
    when = datetime(2026, 1, 31, tzinfo=UTC)
    return Message(id=str(place), type="Noted", source="/", subject=None, key=key, time=when, data=b"{}", attributes={})


class Broker:
    """Keeps the waves; has a verdict for the messages with these places, and takes all others."""

    def __init__(self, verdicts: dict[int, Exception] | None = None) -> None:
        self.waves: list[list[int]] = []
        self._verdicts = verdicts or {}

    async def publish(self, wave: Sequence[Parcel]) -> list[Verdict]:
        places = [int(parcel.message.id) for parcel in wave]
        self.waves.append(places)
        return [self._verdicts.get(place) for place in places]


async def test_waves_have_each_key_once_and_keep_the_order_of_keys() -> None:
    broker = Broker()
    assert await publish_in_order(parcels("abacaab"), broker.publish) == [None] * 7
    assert broker.waves == [[0, 1, 3], [2, 6], [4], [5]]


async def test_nothing_is_published_for_no_messages() -> None:
    broker = Broker()
    assert await publish_in_order([], broker.publish) == []
    assert broker.waves == []


async def test_a_key_waits_behind_its_first_failure_and_its_messages_have_this_failure_as_verdict() -> None:
    full, too_large = RuntimeError("the stream is full"), Unprocessable("too large")
    broker = Broker({1: full, 2: too_large})
    verdicts = await publish_in_order(parcels("abacaabb"), broker.publish)
    assert broker.waves == [[0, 1, 3], [2]]
    assert verdicts == [None, full, too_large, None, too_large, too_large, full, full]
