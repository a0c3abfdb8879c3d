"""``outboxio retry`` and ``skip``, the commands of declared operations, and the options that operations share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated
from uuid import UUID

import typer
from msgspec import Struct
from msgspec.structs import asdict, replace

from outboxio.cli.filter_options import FilterOptions
from outboxio.cli.internals import admin_of, refuse_unknown_handler
from outboxio.cli.options import Common, Options
from outboxio.cli.output import Exit, confirm, echo, echo_error, echo_json, line, progress
from outboxio.cli.target import TargetError
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.operations.declared import DECLARED, Values
from outboxio.outbox import Outbox


class OutputFormat(Options, frozen=True):
    """How an operation is confirmed, recorded and printed."""

    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what the operation would do.")] = False
    reason: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Reason, stored with the operation.", show_default=False),
    ] = None
    as_json: bool = False

    def with_json(self, common: Common) -> OutputFormat:
        """Return the same options, with JSON output if requested."""
        return replace(self, as_json=common.json)

    def printed(self, text: str, code: Exit = Exit.OK) -> Exit:
        """Print the result of an operation, and return the exit code."""
        if self.as_json:
            echo_json({"ok": code is Exit.OK, "message": text} | ({"dry_run": True} if self.dry_run else {}))
        else:
            echo(line(_mark(code is Exit.OK), f"  {'dry run: ' * self.dry_run}{text}"))
        return code


def _mark(is_fine: bool) -> tuple[str, str]:
    return ("ok", "green") if is_fine else ("WARN", "yellow")


# --- the commands of declared operations ----------------------------------------------------------
#
# ``outboxio pause``, ``resume``, ``replay``, ``purge`` and so on. A dry run checks the arguments as the operation does,
# and prints what it would do; it changes and records nothing.


_AMONG_ROWS = ("resume", "replay")  # operations that also accept handlers with only finished notifications


async def run(outbox: Outbox, kind: str, values: Values, output: OutputFormat) -> Exit:
    """Run a declared operation, after a confirmation if it cannot be undone."""
    declared, admin = DECLARED[kind], admin_of(outbox)
    if (handler := values.get("handler")) is not None:
        types = values.get("types") or ()
        await refuse_unknown_handler(outbox, handler, types=types, among_rows=kind in _AMONG_ROWS)
    confirms, does = declared.confirm == "always", declared.text(declared.does, admin, values)
    if confirms or output.dry_run:
        preview = await declared.preview(admin, values)
        if preview.nothing is not None:
            return output.printed(preview.nothing, Exit.OK if preview.is_fulfilled else Exit.FAILED)
        effect = " ".join(preview.effect)
        if output.dry_run:
            return output.printed(f"would {does}. {effect}".rstrip())
        typed = declared.typed and declared.text(declared.typed, admin, values)
        if not confirm(f"{does}? {effect}", yes=output.yes, typed=typed):
            return Exit.FAILED
    result = await declared.run(admin, values, output.reason)
    if isinstance(result, Operation):
        pending = f"not finished yet; see operation {result.id} in outboxio operations"
        text = declared.result(result.done, admin, values) if result.has_ended else pending
        return _print_result(result, output, text)
    code = Exit.FAILED if result is False or result == 0 else Exit.OK
    if output.as_json and isinstance(result, Struct):
        echo_json(asdict(result))
        return code
    if output.as_json and type(result) is int:
        echo_json({"number": result})
        return code
    return output.printed(declared.result(result, admin, values), code)


# --- ``outboxio retry`` and ``outboxio skip`` -----------------------------------------------------


MAX_WITHOUT_ALL = 10_000  # notifications that an operation changes without --all


class Selection(Struct, frozen=True):
    """The notifications of an operation: ids, or a filter."""

    ids: Sequence[UUID]
    filters: FilterOptions
    all: bool
    background: bool = False

    def chosen(self, kind: str) -> Sequence[UUID] | Filter:
        """Return the ids, or the filter. Refuses both together, and everything without ``--all``."""
        if self.ids and (self.all or not self.filters.is_empty):
            raise TargetError("ids and filter options exclude each other; use one of the two")
        if self.ids:
            return self.ids
        if self.filters.is_empty and not self.all:
            raise TargetError(f"{kind} needs ids, filter options, or --all")
        return self.filters.filter()


async def change(outbox: Outbox, kind: str, selection: Selection, output: OutputFormat) -> Exit:
    """Retry or skip notifications: count them, ask for confirmation, then run the operation and show its progress."""
    admin = admin_of(outbox)
    operate: Callable[..., Awaitable[Operation]] = admin.retry if kind == "retry" else admin.skip
    chosen = selection.chosen(kind)
    planned = await operate(chosen, dry_run=True)
    plural = "s" * (planned.matched != 1)
    number = f"{planned.matched:,}{'' if planned.is_complete else '+'} notification{plural}"
    if output.dry_run or not planned.matched:
        refused = f", but {planned.refused:,} of them cannot be changed" if planned.refused else ""
        return _print_result(planned, output, f"would {kind} {number}{refused}")
    if planned.matched > MAX_WITHOUT_ALL and not selection.all:
        raise TargetError(f"{number} match, but {kind} changes at most {MAX_WITHOUT_ALL:,} without --all: add --all")
    if not confirm(f"{kind} {number}?", yes=output.yes or bool(selection.ids)):
        return Exit.FAILED
    if selection.background:
        done = await operate(chosen, reason=output.reason, background=True)
        return _print_result(done, output, f"started operation {done.id}; see its progress with outboxio operations")
    with progress(kind) as report:

        def shown(now: Operation) -> None:
            report(now.done + now.refused, planned.matched)

        done = await operate(chosen, reason=output.reason, progress=shown)
    return _print_result(done, output, None)


# --- results --------------------------------------------------------------------------------------


def _print_result(operation: Operation, output: OutputFormat, text: str | None) -> Exit:
    if output.as_json:
        echo_json(operation)
    else:
        numbers = (
            f"{operation.kind}: {operation.done:,} of {operation.matched:,} changed, {operation.refused:,} refused"
        )
        echo(line(f"  {text or numbers}"))
    if operation.error is not None:
        echo_error(operation.error)
    if not operation.matched:
        return Exit.FAILED
    is_partial = not operation.is_dry_run and operation.has_ended and operation.done < operation.matched
    return Exit.PARTIAL if is_partial or operation.state in (OperationState.STOPPED, OperationState.FAILED) else Exit.OK
