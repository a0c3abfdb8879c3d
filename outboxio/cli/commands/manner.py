"""How an order is given, and its answer in words."""

from __future__ import annotations

from msgspec import Struct

from outboxio.cli.answer import Exit, line, say, say_json


class Manner(Struct, frozen=True):
    """How an order is given."""

    yes: bool = False
    dry_run: bool = False
    reason: str | None = None
    as_json: bool = False

    def said(self, text: str, code: Exit = Exit.FINE) -> Exit:
        """Print the answer to an order; the exit code."""
        if self.as_json:
            say_json({"ok": code is Exit.FINE, "message": text} | ({"dry_run": True} if self.dry_run else {}))
        else:
            say(line(_mark(code is Exit.FINE), f"  {'dry run: ' * self.dry_run}{text}"))
        return code


def _mark(is_fine: bool) -> tuple[str, str]:
    return ("ok", "green") if is_fine else ("..", "yellow")
