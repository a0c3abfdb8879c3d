"""Groups of failures: equal handler and equal fingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from outboxio.model.operating.groups import Filter, Group, fingerprint
from outboxio.model.redaction import Redact
from outboxio.storage.protocols import LastError


def grouped(errors: Mapping[str, Sequence[LastError]], filter: Filter, redact: Redact) -> list[Group]:
    """The groups of the last errors of notifications, the largest first.

    ``errors``: by shard. ``filter``: the filter that selected the notifications.
    """
    groups: dict[tuple[str, str], list[tuple[str, LastError]]] = {}
    shown: dict[str, str] = {}  # by fingerprint: ``redact`` may be slow
    for shard, found in errors.items():
        for error in found:
            told = fingerprint(error.type, error.message)
            if told not in shown:
                # If ``redact`` changes the fingerprint, the message is not shown, and only the type counts.
                shown[told] = told if redact(told) == told else f"{error.type}: *"
            groups.setdefault((error.handler_name, shown[told]), []).append((shard, error))
    made = [_group(name, shown, members, filter, redact) for (name, shown), members in groups.items()]
    return sorted(made, key=lambda group: (-group.number, group.handler_name, group.fingerprint))


def _group(name: str, shown: str, members: Sequence[tuple[str, LastError]], filter: Filter, redact: Redact) -> Group:
    newest = max((error for _, error in members), key=lambda error: error.updated_date)
    shards = sorted({shard for shard, _ in members})
    return Group(
        handler_name=name,
        fingerprint=shown,
        number=len(members),
        first_seen=min(error.updated_date for _, error in members),
        last_seen=newest.updated_date,
        sample=redact(f"{newest.type}: {newest.message}"),
        notification_id=newest.id,
        event_id=newest.event_id,
        filter=replace(filter, handler=name, error=shown),
        shard=", ".join(shards),
    )
