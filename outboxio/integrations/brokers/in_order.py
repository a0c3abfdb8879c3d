"""Publishing with ``ordered=True``: no message of a key leaves before the broker has the message before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from outboxio.integrations.brokers.relay import Parcel, Verdict

Publish = Callable[[Sequence[Parcel]], Awaitable[Sequence[Verdict]]]


async def publish_in_order(parcels: Sequence[Parcel], publish: Publish) -> list[Verdict]:
    """Publish messages in waves. A wave has one message of each key; a key waits behind its first failure.

    Example::

        verdicts = await publish_in_order(parcels, self._publish_together)
    """
    waves: list[list[int]] = []
    seen: dict[str, int] = {}
    for place, parcel in enumerate(parcels):
        number = seen.get(parcel.message.key, 0)
        seen[parcel.message.key] = number + 1
        if number == len(waves):
            waves.append([])
        waves[number].append(place)
    verdicts: list[Verdict] = [None] * len(parcels)
    failed: dict[str, Exception] = {}
    for wave in waves:
        going: list[int] = []
        for place in wave:
            before = failed.get(parcels[place].message.key)
            if before is None:
                going.append(place)
            else:
                verdicts[place] = before
        if not going:
            continue
        for place, verdict in zip(going, await publish([parcels[place] for place in going]), strict=True):
            if verdict is not None:
                verdicts[place] = failed[parcels[place].message.key] = verdict
    return verdicts
