"""The commands of declared operations: ``outboxio pause``, ``resume``, ``replay``, ``purge`` and so on.

A dry run checks the same arguments as the operation and says what it would do; it changes and records nothing.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import asdict

from outboxio.cli.answer import Exit, say_json
from outboxio.cli.asking import ask
from outboxio.cli.commands.manner import Manner
from outboxio.cli.inside import admin_of, refuse_unknown_handler
from outboxio.operations.declared import DECLARED, Values
from outboxio.outbox import Outbox

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
            return manner.said(preview.nothing, Exit.FINE if kind == "pause" else Exit.NO)
        effect = " ".join(preview.effect)
        if manner.dry_run:
            return manner.said(f"would {does}. {effect}".rstrip())
        typed = declared.typed and declared.text(declared.typed, admin, values)
        if not ask(f"{does}? {effect}", yes=manner.yes, typed=typed):
            return Exit.NO
    result = await declared.run(admin, values, manner.reason)
    code = Exit.NO if result is False or result == 0 else Exit.FINE
    if manner.as_json and isinstance(result, Struct):
        say_json(asdict(result))
        return code
    if manner.as_json and type(result) is int:
        say_json({"number": result})
        return code
    return manner.said(declared.result(result, admin, values), code)
