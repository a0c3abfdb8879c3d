"""``outboxio status``: how much there is in each state, shard by shard."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec
from msgspec import Struct
from rich import box
from rich.table import Table
from rich.text import Text

from outboxio.cli.answer import Exit, exit_code, in_words, line, say, say_error, say_json
from outboxio.cli.commands import glance
from outboxio.cli.inside import admin_of, databases, health_of
from outboxio.cli.target import TargetError
from outboxio.errors import OutboxError
from outboxio.health.rules import NOT_RUNNING
from outboxio.operations.partitions.owners import HandlerPartitions
from outboxio.outbox import Outbox
from outboxio.support.duration import format_duration, parse_duration

_MEANINGS = {
    "PENDING": "waits for its handler",
    "FAILED": "waits for its retry",
    "BLOCKED": "waits for its predecessor",
    "DYING": "given up, its hook is still to run",
    "SUCCEEDED": "handled",
    "EXPIRED": "outlived the retention window",
    "DEAD": "given up: look at its errors",
    "SKIPPED": "skipped by an operator",
    "undelivered": "events not fanned out yet, or without any handler",
    "unroutable": "notifications whose handler, or whose version of the event, no process has",
}
_ALARMING = {"DEAD", "EXPIRED", "unroutable"}


class Report(Struct):
    """The answers of the shards."""

    counts: dict[str, dict[str, int]]
    errors: dict[str, OutboxError]
    partitions: list[HandlerPartitions] = []
    """The handlers with several partitions."""

    @property
    def total(self) -> dict[str, int]:
        names = {name: None for counts in self.counts.values() for name in counts}
        return {name: sum(counts.get(name, 0) for counts in self.counts.values()) for name in names}


async def status(outbox: Outbox, fail_on: Sequence[str] = (), *, as_json: bool) -> Exit:
    """The overview, and the exact counts of each shard. An unreachable shard does not hide the counts of the rest.

    ``fail_on``: rules and levels of findings for which the answer is no.
    """
    glance.refuse_unknown_rules(fail_on)
    report, overview = await _ask_all(outbox), await admin_of(outbox).overview()
    for error in report.errors.values():
        say_error(in_words(error))
    if as_json:
        errors = {shard: in_words(error) for shard, error in report.errors.items()}
        answer = {"namespace": outbox.namespace, "total": report.total, "shards": report.counts, "errors": errors}
        owners = [
            {"shard": one.shard, "handler_name": one.handler_name, "number": one.number, "owners": _owners(one)}
            for one in report.partitions
        ]
        more = {"partitions": owners, "overview": overview}
        say_json(answer | more)
    elif report.counts:
        say("", glance.shown(overview), "", _table(outbox.namespace, report), "")
        if report.partitions:
            say(_table_of_owners(report), "")
    no = Exit.NO if glance.fails(overview, fail_on) else Exit.FINE
    return max(map(exit_code, report.errors.values()), default=no)


async def _ask_all(outbox: Outbox) -> Report:
    report = Report({}, {})
    for shard, database in databases(outbox).items():
        try:
            await database.schema.check()
            report.counts[shard] = await outbox.admin.counts(shard=shard)
            report.partitions += [one for one in await outbox.admin.partitions(shard=shard) if one.active > 1]
        except OutboxError as error:
            report.errors[shard] = error
    return report


def _owners(one: HandlerPartitions) -> dict[str, int]:
    """How many partitions each process owns."""
    return {owner: len(partitions) for owner, partitions in one.by_owner.items() if owner is not None}


def _table_of_owners(report: Report) -> Table:
    """For each handler with several partitions, the number of partitions of each process."""
    several = len(report.counts) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    table.add_column("handler", overflow="fold")
    table.add_column("process", overflow="fold")
    table.add_column("partitions", justify="right")
    for one in sorted(report.partitions, key=lambda one: (one.handler_name, one.shard)):
        name = line((one.handler_name, "bold"), f" on {one.shard}" if several else "")
        for owner, number in sorted(_owners(one).items()):
            table.add_row(name, line(owner), str(number))
            name = Text("")
        if free := len(one.by_owner.get(None, ())):
            table.add_row(name, Text("no process", "bold yellow"), str(free))
        table.add_section()
    return table


def _table(namespace: str, report: Report) -> Table:
    columns: Sequence[tuple[str, Mapping[str, int]]] = list(report.counts.items())
    if len(columns) > 1:
        columns = [*columns, ("all", report.total)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column(line((namespace, "bold")))
    for shard, _ in columns:
        table.add_column(line(shard), justify="right")
    table.add_column("")
    for name in report.total:
        if name == "undelivered":
            table.add_section()
        numbers = [_number(name, counts.get(name, 0)) for _, counts in columns]
        table.add_row(line(name), *numbers, Text(_MEANINGS.get(name, ""), "dim"))
    return table


def _number(name: str, number: int) -> Text:
    if number == 0:
        return Text("0", "dim")
    return Text(f"{number:,}", "bold red" if name in _ALARMING else "bold")


# --- ``outboxio health``: asks a running worker over HTTP, or the database ------------------------


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
    told["reasons"] = [reason for reason in health.reasons if reason != NOT_RUNNING["stopped"]]
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
