"""Stand-ins for parts of the core that are on their way: ``Unavailable``, ``receive_many``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import outboxio.errors
from outboxio.errors import InvalidEvent, RetryAfter


class _Unavailable(RetryAfter):
    def __init__(self, reason: str, *, retry_in: Any = None) -> None:
        super().__init__(1.0 if retry_in is None else retry_in, count_attempt=False)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


Unavailable: Any = getattr(outboxio.errors, "Unavailable", _Unavailable)


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
