"""``outboxio health``: asks a running worker over HTTP, or the database."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import msgspec
from msgspec import Struct

from outboxio.cli.answer import Exit, line, say, say_error, say_json
from outboxio.cli.inside import health_of
from outboxio.cli.target import TargetError
from outboxio.health.verdict import PHASES
from outboxio.outbox import Outbox
from outboxio.support.duration import format_duration, parse_duration

Page = Literal["live", "ready", "health"]
_COLOURS = {"ok": "green", "degraded": "yellow", "down": "bold red"}


class Question(Struct, frozen=True):
    """The asked page, the longest time for the answer, and the longest time that due work may have waited."""

    page: Page
    timeout: timedelta
    max_age: timedelta | None = None


def question_of(*, live: bool, ready: bool, max_age: str | None, timeout: str, port: int | None) -> Question:
    """The question of the options. Raises :class:`TargetError` for options that do not go together."""
    if live and ready:
        raise TargetError("--live and --ready are two questions: ask one of them")
    if (live or ready) and port is None:
        raise TargetError("--live and --ready ask a running worker: give --port beside them")
    if (live or ready) and max_age is not None:
        raise TargetError("--max-age goes with neither --live nor --ready, which do not depend on a backlog")
    page: Page = "live" if live else "ready" if ready else "health"
    age = None if max_age is None else parse_duration(max_age, key="--max-age")
    return Question(page, parse_duration(timeout, key="--timeout"), age)


def refuse_target(target: str | None, database: str | None) -> None:
    """Raise :class:`TargetError` if an outbox is named beside a port."""
    if target is not None or database is not None:
        raise TargetError("--port asks a running worker: give neither an outbox nor --database beside it")


async def ask_worker(host: str, port: int, question: Question, *, as_json: bool) -> Exit:
    """Ask the health pages of a worker."""
    try:
        async with asyncio.timeout(question.timeout.total_seconds()):
            status, told = await _get(host, port, f"/{question.page}")
    except (OSError, TimeoutError, ValueError, msgspec.DecodeError) as error:
        reason = (
            f"no answer within {format_duration(question.timeout)}" if isinstance(error, TimeoutError) else str(error)
        )
        say_error(f"no worker answers on {host}:{port}: {reason}")
        return Exit.UNREACHABLE
    word = told["status"] if question.page == "health" else f"{'' if status == 200 else 'not '}{question.page}"
    return _tell(word, told, question, is_fine=status == 200, as_json=as_json)


async def ask_database(outbox: Outbox, question: Question, *, as_json: bool) -> Exit:
    """Ask the database. That this process runs no handlers is no news."""
    health = await health_of(outbox, question.timeout.total_seconds())
    told: dict[str, Any] = msgspec.to_builtins(health)
    left_out = ("live", "ready", "phase", "loops", "stuck")
    told = {key: value for key, value in told.items() if key not in left_out}
    told["reasons"] = [reason for reason in health.reasons if reason != PHASES["stopped"]]
    exit = _tell(health.status, told, question, is_fine=health.status != "down", as_json=as_json)
    if all(shard.reachable is False for shard in health.shards.values()):
        return Exit.UNREACHABLE
    return exit


def _tell(word: str, told: Mapping[str, Any], question: Question, *, is_fine: bool, as_json: bool) -> Exit:
    late = _late(told, question.max_age)
    reasons = [*told["reasons"], *late]
    if as_json:
        say_json({**told, "reasons": reasons})
    else:
        colour = _COLOURS.get(word, "green" if is_fine else "bold red")
        say(line((word, colour), f": {'; '.join(reason.removesuffix('.') for reason in reasons)}" if reasons else ""))
    return Exit.FINE if is_fine and not late else Exit.NO


def _late(told: Mapping[str, Any], max_age: timedelta | None) -> list[str]:
    """The due work that has waited for longer than ``max_age``, in sentences."""
    if max_age is None:
        return []
    oldest: Mapping[str, float] = told.get("oldest_due", {})
    waits = {"fan-out": told.get("lag") or 0.0, **{f"handler {name!r}": age for name, age in oldest.items()}}
    return [
        f"work of {who} has waited for {format_duration(timedelta(seconds=round(age, 1)))}, longer than "
        f"{format_duration(max_age)}"
        for who, age in waits.items()
        if age > max_age.total_seconds()
    ]


async def _get(host: str, port: int, path: str) -> tuple[int, Mapping[str, Any]]:
    """The status and the JSON object of a page."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.transport.abort()
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or words[1] not in (b"200", b"503"):
        raise ValueError("the answer is none of the health pages of outboxio")
    return int(words[1]), msgspec.json.decode(body, type=dict[str, Any])
