"""``outboxio status`` and ``outboxio health``."""

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

from outboxio.cli.commands import glance
from outboxio.cli.internals import admin_of, databases, health_of
from outboxio.cli.output import Exit, echo, echo_error, echo_json, error_text, exit_code, line
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
    "DYING": "failed permanently, its on_dead hook still has to run",
    "SUCCEEDED": "handled",
    "EXPIRED": "exceeded the retention window",
    "DEAD": "failed permanently: see its errors",
    "SKIPPED": "skipped by an operator",
    "undelivered": "events that are not fanned out yet, or have no handler",
    "unroutable": "no process has the handler, or this version of the event",
}
_ALARMING = {"DEAD", "EXPIRED", "unroutable"}


class Report(Struct):
    """The results of the shards."""

    counts: dict[str, dict[str, int]]
    errors: dict[str, OutboxError]
    partitions: list[HandlerPartitions] = []
    """Handlers with several partitions."""

    @property
    def total(self) -> dict[str, int]:
        names = {name: None for counts in self.counts.values() for name in counts}
        return {name: sum(counts.get(name, 0) for counts in self.counts.values()) for name in names}


async def status(outbox: Outbox, fail_on: Sequence[str] = (), *, as_json: bool) -> Exit:
    """Print the overview, and the exact counts of each shard, even if other shards cannot be reached.

    ``fail_on``: the rules and levels of findings with which the command fails.
    """
    glance.refuse_unknown_rules(fail_on)
    report, overview = await _read_all(outbox), await admin_of(outbox).overview()
    for error in report.errors.values():
        echo_error(error_text(error))
    if as_json:
        errors = {shard: error_text(error) for shard, error in report.errors.items()}
        answer = {"namespace": outbox.namespace, "total": report.total, "shards": report.counts, "errors": errors}
        owners = [
            {"shard": one.shard, "handler_name": one.handler_name, "number": one.number, "owners": _owners(one)}
            for one in report.partitions
        ]
        more = {"partitions": owners, "overview": overview}
        echo_json(answer | more)
    elif report.counts:
        echo("", glance.shown(overview), "", _table(outbox.namespace, report), "")
        if report.partitions:
            echo(_table_of_owners(report), "")
    no = Exit.FAILED if glance.fails(overview, fail_on) else Exit.OK
    return max(map(exit_code, report.errors.values()), default=no)


async def _read_all(outbox: Outbox) -> Report:
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
    """Return the number of partitions that each process owns."""
    return {owner: len(partitions) for owner, partitions in one.by_owner.items() if owner is not None}


def _table_of_owners(report: Report) -> Table:
    """Return a table of the partitions per process, for handlers with several partitions."""
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


# --- ``outboxio health``: probes a running worker over HTTP, or reads the database ----------------


Page = Literal["live", "ready", "health"]
_COLOURS = {"ok": "green", "degraded": "yellow", "down": "bold red"}


class HealthQuery(Struct, frozen=True):
    """The requested page, the timeout, and the longest time that due work may have waited."""

    page: Page
    timeout: timedelta
    max_age: timedelta | None = None


def health_query(*, live: bool, ready: bool, max_age: str | None, timeout: str, port: int | None) -> HealthQuery:
    """Return the query of the options. Raises :class:`TargetError` for options that exclude each other."""
    if live and ready:
        raise TargetError("--live and --ready exclude each other; use one of them")
    if (live or ready) and port is None:
        raise TargetError("--live and --ready probe a running worker: add --port")
    if (live or ready) and max_age is not None:
        raise TargetError("--max-age cannot be used with --live or --ready, which do not depend on the backlog")
    page: Page = "live" if live else "ready" if ready else "health"
    age = None if max_age is None else parse_duration(max_age, key="--max-age")
    return HealthQuery(page, parse_duration(timeout, key="--timeout"), age)


def refuse_target(target: str | None, database: str | None) -> None:
    """Raise :class:`TargetError` if the command line names an outbox as well as a port."""
    if target is not None or database is not None:
        raise TargetError("--port probes a running worker; it cannot be used with an outbox or --database")


async def probe_worker(host: str, port: int, query: HealthQuery, *, as_json: bool) -> Exit:
    """Probe the health pages of a worker."""
    try:
        async with asyncio.timeout(query.timeout.total_seconds()):
            code, body = await _get(host, port, f"/{query.page}")
    except (OSError, TimeoutError, ValueError, msgspec.DecodeError) as error:
        reason = (
            f"no response within {format_duration(query.timeout)}" if isinstance(error, TimeoutError) else str(error)
        )
        echo_error(f"no worker responds on {host}:{port}: {reason}")
        return Exit.UNREACHABLE
    status = body["status"] if query.page == "health" else f"{'' if code == 200 else 'not '}{query.page}"
    return _print_health(status, body, query, is_fine=code == 200, as_json=as_json)


async def probe_database(outbox: Outbox, query: HealthQuery, *, as_json: bool) -> Exit:
    """Read the health from the database, omitting the reason that this process runs no handlers."""
    health = await health_of(outbox, query.timeout.total_seconds())
    body: dict[str, Any] = msgspec.to_builtins(health)
    excluded = ("live", "ready", "phase", "loops", "stuck")
    body = {key: value for key, value in body.items() if key not in excluded}
    body["reasons"] = [reason for reason in health.reasons if reason != NOT_RUNNING["stopped"]]
    exit = _print_health(health.status, body, query, is_fine=health.status != "down", as_json=as_json)
    if all(shard.reachable is False for shard in health.shards.values()):
        return Exit.UNREACHABLE
    return exit


def _print_health(status: str, body: Mapping[str, Any], query: HealthQuery, *, is_fine: bool, as_json: bool) -> Exit:
    late = _late(body, query.max_age)
    reasons = [*body["reasons"], *late]
    if as_json:
        echo_json({**body, "reasons": reasons})
    else:
        colour = _COLOURS.get(status, "green" if is_fine else "bold red")
        echo(
            line((status, colour), f": {'; '.join(reason.removesuffix('.') for reason in reasons)}" if reasons else "")
        )
    return Exit.OK if is_fine and not late else Exit.FAILED


def _late(body: Mapping[str, Any], max_age: timedelta | None) -> list[str]:
    """Return sentences about due work that has waited for longer than ``max_age``."""
    if max_age is None:
        return []
    oldest: Mapping[str, float] = body.get("oldest_due", {})
    waits = {"fan-out": body.get("lag") or 0.0, **{f"handler {name!r}": age for name, age in oldest.items()}}
    return [
        f"due work of {who} has waited for {format_duration(timedelta(seconds=round(age, 1)))}, longer than "
        f"{format_duration(max_age)}"
        for who, age in waits.items()
        if age > max_age.total_seconds()
    ]


async def _get(host: str, port: int, path: str) -> tuple[int, Mapping[str, Any]]:
    """Return the status code and the JSON object of a page."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.transport.abort()
    fields = head.split(maxsplit=2)
    if len(fields) < 2 or not fields[0].startswith(b"HTTP/1.") or fields[1] not in (b"200", b"503"):
        raise ValueError("unexpected response; not a health page of outboxio")
    return int(fields[1]), msgspec.json.decode(body, type=dict[str, Any])
