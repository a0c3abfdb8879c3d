"""How an order is given, and its answer in words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated
from uuid import UUID

import typer
from msgspec import Struct
from msgspec.structs import asdict, replace

from outboxio.cli.answer import Exit, ask, line, progress, say, say_error, say_json
from outboxio.cli.choice import Choice
from outboxio.cli.inside import admin_of, refuse_unknown_handler
from outboxio.cli.options import Common, Options
from outboxio.cli.target import TargetError
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.operations.declared import DECLARED, Values
from outboxio.outbox import Outbox


class Manner(Options, frozen=True):
    """How an order is given."""

    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what the order would do.")] = False
    reason: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Why: kept in the record of the order.", show_default=False),
    ] = None
    as_json: bool = False

    def with_json(self, common: Common) -> Manner:
        """The same, with the answer in JSON if the command line says so."""
        return replace(self, as_json=common.json)

    def said(self, text: str, code: Exit = Exit.FINE) -> Exit:
        """Print the answer to an order; the exit code."""
        if self.as_json:
            say_json({"ok": code is Exit.FINE, "message": text} | ({"dry_run": True} if self.dry_run else {}))
        else:
            say(line(_mark(code is Exit.FINE), f"  {'dry run: ' * self.dry_run}{text}"))
        return code


def _mark(is_fine: bool) -> tuple[str, str]:
    return ("ok", "green") if is_fine else ("..", "yellow")


# --- the commands of declared operations ----------------------------------------------------------
#
# The commands of declared operations: ``outboxio pause``, ``resume``, ``replay``, ``purge`` and so on.
#
# A dry run checks the same arguments as the operation and says what it would do; it changes and records nothing.


_AMONG_ROWS = ("resume", "replay")  # operations on handlers of which only finished notifications are left


async def run(outbox: Outbox, kind: str, values: Values, manner: Manner) -> Exit:
    """Run a declared operation, after a question if it cannot be undone."""
    declared, admin = DECLARED[kind], admin_of(outbox)
    if (handler := values.get("handler")) is not None:
        types = values.get("types") or ()
        await refuse_unknown_handler(outbox, handler, types=types, among_rows=kind in _AMONG_ROWS)
    asks, does = declared.asks == "always", declared.text(declared.does, admin, values)
    if asks or manner.dry_run:
        preview = await declared.preview(admin, values)
        if preview.nothing is not None:
            return manner.said(preview.nothing, Exit.FINE if preview.is_fulfilled else Exit.NO)
        effect = " ".join(preview.effect)
        if manner.dry_run:
            return manner.said(f"would {does}. {effect}".rstrip())
        typed = declared.typed and declared.text(declared.typed, admin, values)
        if not ask(f"{does}? {effect}", yes=manner.yes, typed=typed):
            return Exit.NO
    result = await declared.run(admin, values, manner.reason)
    if isinstance(result, Operation):
        pending = f"not finished yet: outboxio operations shows the result of operation {result.id}"
        text = declared.result(result.done, admin, values) if result.has_ended else pending
        return _tell(result, manner, text)
    code = Exit.NO if result is False or result == 0 else Exit.FINE
    if manner.as_json and isinstance(result, Struct):
        say_json(asdict(result))
        return code
    if manner.as_json and type(result) is int:
        say_json({"number": result})
        return code
    return manner.said(declared.result(result, admin, values), code)


# --- ``outboxio retry`` and ``outboxio skip`` -----------------------------------------------------


MOST_WITHOUT_ALL = 10_000  # notifications that an order changes without --all


class Given(Struct, frozen=True):
    """The notifications of an order: ids, or a filter."""

    ids: Sequence[UUID]
    choice: Choice
    all: bool
    background: bool = False

    def chosen(self, order: str) -> Sequence[UUID] | Filter:
        """The ids, or the filter. Refuses both, and an order for everything without ``--all``."""
        if self.ids and (self.all or not self.choice.is_empty):
            raise TargetError("ids and options that choose notifications exclude each other; give one of the two")
        if self.ids:
            return self.ids
        if self.choice.is_empty and not self.all:
            raise TargetError(f"{order} needs ids, options that choose notifications, or --all")
        return self.choice.filter()


async def change(outbox: Outbox, kind: str, given: Given, manner: Manner) -> Exit:
    """Retry or skip notifications: first the number, then the question, then the order with its progress."""
    admin = admin_of(outbox)
    order: Callable[..., Awaitable[Operation]] = admin.retry if kind == "retry" else admin.skip
    chosen = given.chosen(kind)
    planned = await order(chosen, dry_run=True)
    plural = "s" * (planned.matched != 1)
    number = f"{planned.matched:,}{'' if planned.is_complete else '+'} notification{plural}"
    if manner.dry_run or not planned.matched:
        refused = f", and {planned.refused:,} of these cannot be changed" if planned.refused else ""
        return _tell(planned, manner, f"{kind} would reach {number}{refused}")
    if planned.matched > MOST_WITHOUT_ALL and not given.all:
        raise TargetError(f"{number} match, and {kind} changes at most {MOST_WITHOUT_ALL:,} without --all: add --all")
    if not ask(f"{kind} {number}?", yes=manner.yes or bool(given.ids)):
        return Exit.NO
    if given.background:
        done = await order(chosen, reason=manner.reason, background=True)
        return _tell(done, manner, f"ordered: outboxio operations shows how far operation {done.id} is")
    with progress(kind) as report:

        def shown(now: Operation) -> None:
            report(now.done + now.refused, planned.matched)

        done = await order(chosen, reason=manner.reason, progress=shown)
    return _tell(done, manner, None)


# --- in words ------------------------------------------------------------------------------------


def _tell(operation: Operation, manner: Manner, text: str | None) -> Exit:
    if manner.as_json:
        say_json(operation)
    else:
        numbers = (
            f"{operation.kind}: {operation.done:,} of {operation.matched:,} changed, {operation.refused:,} refused"
        )
        say(line(f"  {text or numbers}"))
    if operation.error is not None:
        say_error(operation.error)
    if not operation.matched:
        return Exit.NO
    is_partial = not operation.is_dry_run and operation.has_ended and operation.done < operation.matched
    return (
        Exit.PARTLY if is_partial or operation.state in (OperationState.STOPPED, OperationState.FAILED) else Exit.FINE
    )
