"""A stand-in for a part of the core that is on its way: ``receive_many``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outboxio.errors import InvalidEvent


async def receive_many(inbox: Any, messages: Sequence[Mapping[str, Any]], shard: str | None) -> list[Any]:
    if hasattr(inbox, "receive_many"):
        return list(await inbox.receive_many(messages, on_invalid="return", shard=shard))
    verdicts: list[Any] = []
    for message in messages:
        try:
            verdicts.append(await inbox.receive(**message, shard=shard))
        except InvalidEvent as error:
            verdicts.append(error)
    return verdicts
