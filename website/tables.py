"""Generate pages from the code: errors, the database tables, and the list of decision records.

``python -m website.tables`` updates the pages, and adds missing names to the API pages. A test fails if a page differs
from the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from website.docstrings import FENCE, as_markdown
from website.entries import complete
from website.meanings import COLUMNS, FIXES
from website.stage import DOCS, ROOT

ERRORS, TABLES = DOCS / "reference" / "errors.md", DOCS / "reference" / "tables.md"
DECISIONS = DOCS / "decisions" / "index.md"
MARK = "<!-- Written by python -m website.tables. -->"

_TABLE = re.compile(
    r"((?:^-- [^\n]*\n)*)^CREATE TABLE (?:IF NOT EXISTS )?eventlog\.(\w+) \(\n(.*?)\n\);", re.MULTILINE | re.DOTALL
)
_COLUMN = re.compile(r"^ +([a-z_]+) +([A-Z]+(?:\(\d+\))?)", re.MULTILINE)
_ADDED = re.compile(r"ALTER TABLE eventlog\.(\w+)\s+(ADD COLUMN.*?);", re.DOTALL)
_ADDED_COLUMN = re.compile(r"ADD COLUMN (?:IF NOT EXISTS )?([a-z_]+) +([A-Z]+(?:\(\d+\))?)")


def error_classes() -> dict[str, ast.ClassDef]:
    """Return the classes in outboxio/errors, by name."""
    bodies = (ast.parse(file.read_text("utf-8")).body for file in sorted((ROOT / "outboxio" / "errors").glob("*.py")))
    return {node.name: node for body in bodies for node in body if isinstance(node, ast.ClassDef)}


def errors_section() -> str:
    """Return a section for each error: when it is raised, and its text or its fix."""
    return "\n".join(line for name, node in sorted(error_classes().items()) for line in _error(name, node))


def _error(name: str, node: ast.ClassDef) -> Iterator[str]:
    yield f"### {name}\n"
    text = as_markdown(ast.get_docstring(node) or "")
    yield text.replace(f"{FENCE}python", f"{FENCE}py") + "\n"  # the snippet tests do not run "py" blocks
    if message := message_of(node):
        yield f"{FENCE}text\n{message}\n{FENCE}\n"
    else:
        yield f"**Fix.** {FIXES.get(name, '')}\n"


def message_of(node: ast.ClassDef) -> str:
    """Return the text of the error's message, with a name in angle brackets for each value."""
    return " ".join(_message(node))


def _message(node: ast.ClassDef) -> Iterator[str]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
            for argument in call.args:
                if isinstance(argument, ast.JoinedStr):
                    yield "".join(_part(part, node) for part in argument.values)
            return


def _part(part: ast.expr, error: ast.ClassDef) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    if isinstance(part.value, ast.Call) and ast.unparse(part.value.func) == "len":
        return "<number>"
    for constant in error.body:
        if isinstance(constant, ast.Assign) and f"self.{ast.unparse(constant.targets[0])}" == ast.unparse(part.value):
            return str(ast.literal_eval(constant.value))
    names = [each.id for each in ast.walk(part.value) if isinstance(each, ast.Name)]
    return f"<{names[-1]}>" if names else "<value>"


def tables_section() -> str:
    """Return a section for each database table, with its columns and their PostgreSQL types."""
    files = "\n".join(file.read_text("utf-8") for file in sorted((ROOT / "sql" / "postgres").glob("*.sql")))
    added: dict[str, list[tuple[str, str]]] = {}
    for table, columns in _ADDED.findall(files):
        added.setdefault(table, []).extend(_ADDED_COLUMN.findall(columns))
    lines = []
    for comment, table, body in _TABLE.findall(files):
        words = " ".join(line.removeprefix("-- ") for line in comment.splitlines())
        lines += [f"### {table}\n", f"{words}\n" if words else "", "| column | type | meaning |", "|---|---|---|"]
        for column, type_ in [*_COLUMN.findall(body), *added.get(table, [])]:
            lines.append(f"| `{column}` | {type_.lower()} | {COLUMNS.get(column, '')} |")
        lines.append("")
    return "\n".join(lines)


def decisions_section() -> str:
    """Return a table of the decision records, with their titles."""
    rows = ["| number | decision |", "|---|---|"]
    for file in sorted(DECISIONS.parent.glob("0*.md")):
        number, _, title = file.read_text("utf-8").partition("\n")[0].removeprefix("# ").partition(". ")
        rows.append(f"| [{number}]({file.name}) | {title} |")
    return "\n".join(rows)


def renewed(page: Path) -> str:
    """Return the page with the part after the mark regenerated."""
    head = page.read_text("utf-8").partition(MARK)[0]
    section = SECTIONS[page]()
    return f"{head}{MARK}\n\n{section.rstrip()}\n"


SECTIONS = {ERRORS: errors_section, TABLES: tables_section, DECISIONS: decisions_section}

if __name__ == "__main__":
    complete()
    for each in SECTIONS:
        each.write_text(renewed(each), "utf-8")
