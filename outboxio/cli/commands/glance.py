"""``outboxio doctor``, ``handlers``, ``instances``, ``locks``, and the overview at the top of ``outboxio status``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.internals import admin_of, databases
from outboxio.cli.options import with_outbox
from outboxio.cli.output import Exit, ago, echo, echo_error, echo_json, indented, line, span, terminal, timestamp
from outboxio.cli.target import TargetError
from outboxio.health.rules import RULE_NAMES
from outboxio.health.values import HandlerStatus, InstanceStatus, Overview
from outboxio.outbox import Outbox
from outboxio.support.text import briefly, instead_of

_MARKS = {"ok": ("ok", "green"), "degraded": ("WARN", "yellow"), "down": ("FAIL", "bold red")}
_LABELS = {"fanout": "fan-out", "jobs": "jobs"}
_BARS = " ▁▂▃▄▅▆▇█"


async def doctor(outbox: Outbox, *, as_json: bool) -> Exit:
    """Print what is wrong, each with the command to fix it. Fails if anything is wrong."""
    overview = await admin_of(outbox).overview()
    if as_json:
        echo_json({"level": overview.level, "verdict": overview.verdict, "findings": overview.findings})
    elif overview.findings:
        for finding in overview.findings:
            echo(
                line(_MARKS[finding.level], f"  {finding.text}"),
                line(("      to fix it:  ", "dim"), with_outbox(finding.fix)),
            )
    else:
        echo(*_findings(overview))
    return _code(overview, Exit.OK if overview.level == "ok" else Exit.FAILED)


async def handlers(outbox: Outbox, name: str | None = None, *, as_json: bool) -> Exit:
    """Print the handlers, worst first, or one handler with its options."""
    overview = await admin_of(outbox).overview()
    found = [one for one in overview.handlers if name in (None, one.handler_name)]
    if name is not None and not found:
        names = [one.handler_name for one in overview.handlers]
        raise TargetError(f"no process has registered a handler {briefly(name)}: {instead_of(name, names)}")
    if as_json:
        echo_json(found)
    elif found:
        echo(_handlers(found))
        if name is not None:
            echo("", *_options(found[0], overview.instances))
    else:
        echo(line(("no process has registered a handler yet", "dim")))
    return _code(overview)


async def instances(outbox: Outbox, *, as_json: bool) -> Exit:
    """Print the processes of the cluster, as they report themselves."""
    overview = await admin_of(outbox).overview()
    if as_json:
        echo_json(overview.instances)
    elif overview.instances:
        echo(_instances(overview.instances))
    else:
        echo(line(("WARN", "yellow"), "  no process is running: start a worker, or enter running()"))
    return _code(overview)


async def locks(outbox: Outbox, *, as_json: bool) -> Exit:
    """Print which process holds which cluster lock."""
    found = await admin_of(outbox).locks()
    if as_json:
        echo_json(found)
        return Exit.OK
    shown = Rows("lock", Column("holder", folds=True), "taken (UTC)")
    for lock in found:
        label = _LABELS.get(lock.role) or f"{lock.handler_name}/{lock.partition}"
        free = Text("no process", "bold yellow")
        holder = (
            free if lock.owner is None else line(lock.owner, (" (unresponsive)" * (lock.is_alive is False), "bold red"))
        )
        where = f" on {lock.shard}" if len(databases(outbox)) > 1 else ""
        shown.add(line((label, "bold"), where), holder, timestamp(lock.since))
    echo(shown)
    return Exit.OK


def refuse_unknown_rules(names: Iterable[str]) -> None:
    """Raise :class:`TargetError` for a name that is neither a rule nor a level."""
    known = ("degraded", "down", *RULE_NAMES)
    for name in names:
        if name not in known:
            raise TargetError(f"--fail-on {name}: expected one of {', '.join(known)}")


def fails(overview: Overview, names: Sequence[str]) -> bool:
    """True if a finding has one of these rules or levels. ``degraded`` includes ``down``."""
    return any(
        finding.rule in names or finding.level in names or ("degraded" in names and finding.level == "down")
        for finding in overview.findings
    )


async def watch(outbox: Outbox, every: float, *, as_json: bool) -> Exit:
    """Show the overview, refreshed every few seconds, until a signal arrives."""
    if as_json:
        raise TargetError("--watch cannot be used with --json; run outboxio status --json repeatedly instead")
    console = terminal()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(shown(await admin_of(outbox).overview()), refresh=True)
            await asyncio.sleep(every)


def shown(overview: Overview) -> RenderableType:
    """Return the overview for the terminal: findings, figures, handlers and processes."""
    parts: list[RenderableType] = [*_findings(overview), Text(""), _figures(overview)]
    if overview.handlers:
        parts += [Text(""), _handlers(overview.handlers)]
    parts += [Text(""), _processes(overview.instances)]
    return Group(*parts)


def _code(overview: Overview, code: Exit = Exit.OK) -> Exit:
    """Return the exit code of an overview. Unreachable shards are named on stderr."""
    lost = [shard for shard in overview.shards if not shard.is_reachable]
    for shard in lost:
        echo_error(f"shard {shard.shard}: {shard.error}")
    return Exit.UNREACHABLE if lost else code


def _findings(overview: Overview) -> list[RenderableType]:
    if not overview.findings:
        return [line(_MARKS["ok"], f"  {sentence}") for sentence in overview.verdict]
    return [line(_MARKS[finding.level], f"  {finding.text}") for finding in overview.findings]


def _figures(overview: Overview) -> RenderableType:
    figures = overview.figures
    grid = Table.grid(padding=(0, 3))
    values: Sequence[tuple[str, str, str]] = (
        (f"{figures.undelivered:,}", "waiting for fan-out", _age(figures.oldest_undelivered)),
        (f"{figures.due:,}", "due now", _age(figures.oldest_due)),
        (f"{sum(figures.reasons.values()):,}", "unfinished", _waits(figures.reasons)),
        (f"{figures.dead_hour:,}", "dead in the last hour", f"of {figures.dead:,}"),
        (f"{figures.per_minute:,.0f}", "succeeded per minute", sparkline(figures.minutes[-30:])),
    )
    for number, what, more in values:
        grid.add_row(Text(number, "bold", justify="right"), Text(what), Text(more, "dim"))
    return indented(grid)


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f"oldest {span(seconds)}"


def _handlers(found: Sequence[HandlerStatus]) -> Rows:
    due, oldest, dead, ok, fail = (Column(name, right=True) for name in ("due", "oldest", "dead/h", "ok/min", "fail"))
    p95, runs = Column("p95", right=True, spare=1), Column("runs", right=True, spare=2)
    bars = Column("last 20 min", spare=3)
    waits = {one.handler_name: _waits(one.reasons) for one in found}
    why = ["waits for"] if any(waits.values()) else []
    made = Rows(Column(""), "handler", due, oldest, *why, dead, ok, bars, fail, p95, runs, "held by")
    for one in found:
        holders = sorted({holder for each in one.holders.values() for holder in each})
        held = Text("paused", "yellow") if one.paused_since is not None else line(_held(holders))
        made.add(
            line(_MARKS[one.level]), line((one.handler_name, "bold")), f"{one.due:,}",
            "" if one.oldest_due is None else span(one.oldest_due),
            *(waits[one.handler_name] for _ in why), f"{one.dead_hour:,}",
            f"{one.per_minute:,.0f}", sparkline(one.minutes[-20:]),
            "" if one.fail_share is None else f"{one.fail_share:.0%}",
            "" if one.duration_p95 is None else span(one.duration_p95),
            f"{one.in_flight}/{one.limit}" if one.limit else f"{one.in_flight}", held,
        )  # fmt: skip
    return made


def _waits(reasons: Mapping[str, int]) -> str:
    """Return why notifications that are not simply queued wait, such as ``retry 3, paused 12``."""
    return ", ".join(f"{reason} {number:,}" for reason, number in reasons.items() if number and reason != "queued")


def _options(one: HandlerStatus, instances: Sequence[InstanceStatus]) -> list[Text]:
    """Return the non-default options of a handler, with the process that reports them."""
    if one.options is None:
        return [line(("no running process reports its options", "dim"))]
    version = next((each.version for each in instances if each.instance == one.options_from), "")
    heading = line(("non-default options, reported by ", "dim"), f"{one.options_from} ({version})")
    return [heading, *(line(f"  {option}={value}") for option, value in one.options.items())]


def _held(holders: Sequence[str]) -> str:
    if not holders:
        return "no process"
    return holders[0] if len(holders) == 1 else f"{len(holders)} processes"


def _instances(found: Sequence[InstanceStatus]) -> Rows:
    numbers = (Column(name, right=True) for name in ("loop lag", "runs", "stuck"))
    made = Rows("process", Column("version", spare=2), "roles", Column("started", spare=1), "seen", *numbers)
    for one in found:
        seen = line((ago(one.last_seen_date), "default" if one.is_alive else "bold red"))
        lag = "" if one.loop_lag is None else span(one.loop_lag)
        does = ", ".join((*one.roles, *["jobs"] * bool(one.jobs)))
        made.add(
            line((one.instance, "bold")), line(one.version), line(does), ago(one.started_date), seen, lag,
            str(one.in_flight), str(one.stuck),
        )  # fmt: skip
    return made


def _processes(found: Sequence[InstanceStatus]) -> Text:
    alive = [one for one in found if one.is_alive]
    if not alive:
        return line(("no process is running", "yellow"))
    return line((f"{len(alive)} process{'es' * (len(alive) > 1)} running: ", "dim"), ", ".join(_names(alive)))


def _names(alive: Sequence[InstanceStatus]) -> list[str]:
    names = [one.instance for one in alive[:3]]
    return [*names, f"and {len(alive) - 3} more"] if len(alive) > 3 else names


def sparkline(numbers: Sequence[int]) -> str:
    """Return the numbers as bars, oldest first."""
    highest = max(numbers, default=0)
    if not highest:
        return ""
    return "".join(_BARS[-(-number * (len(_BARS) - 1) // highest)] for number in numbers)
