"""A list over several shards."""

from __future__ import annotations

from collections.abc import Sequence

from outboxio.model.notification import NotificationRecord


def merged(lists: Sequence[Sequence[NotificationRecord]], limit: int) -> list[NotificationRecord]:
    """The first ``limit`` records of several lists. Each list keeps its order; between lists, the last change decides.

    Example::

        merged([[a, c], [b]], 2)  # [a, b], if b has changed after c
    """
    if len(lists) == 1:
        return list(lists[0][:limit])
    taken, chosen = [0] * len(lists), list[NotificationRecord]()
    while len(chosen) < limit:
        heads = [(rows[at].updated_date, -number) for number, (rows, at) in enumerate(zip(lists, taken, strict=True))
                 if at < len(rows)]  # fmt: skip
        if not heads:
            break
        number = -max(heads)[1]
        chosen.append(lists[number][taken[number]])
        taken[number] += 1
    return chosen
