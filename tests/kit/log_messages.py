"""The log messages of the package, read from the source: logger, levels, message, and fields.

``python -m tests.kit.log_messages`` prints the table of docs/reference/logs.md; ``--write`` puts it into the page.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from tests.kit.sources import ROOT, modules, tree_of

PAGE = ROOT / "docs" / "reference" / "logs.md"
HEADING = "## All messages"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
RUN = "the run"
"""Stands for the fields of ``Run.log_fields``."""

_METHODS = {"log", *map(str.lower, LEVELS)}
_MACHINERY = ("outboxio/support/log.py", "outboxio/loops/log_limiter.py", "outboxio/cli/logs.py")
"""The modules that pass messages on."""
_OF_CLI = {("outboxio.worker", "INFO", "%s %s: %s", ("handler", "job", "shard"))}
_KNOWN = {"asdict(done)": {"fanned_out", "succeeded", "failed", "expired", "dead"}}

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


class Message(NamedTuple):
    logger: str
    levels: str
    text: str
    fields: tuple[str, ...]


@cache
def messages() -> list[Message]:
    """All log messages, in the order of loggers and levels."""
    found = {Message(*one) for one in _OF_CLI}
    for path in modules():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("outboxio/") and name not in _MACHINERY:
            found |= set(_Module(name, tree_of(path)).messages())
    return sorted(found, key=lambda one: (one.logger, LEVELS.index(one.levels.split(", ")[0]), one.text))


class _Module:
    def __init__(self, name: str, tree: ast.Module) -> None:
        self._name = name
        self._tree = tree
        self._all = [node for node in ast.walk(tree) if isinstance(node, AnyFunction)]
        self._functions = {function.name: function for function in self._all}

    def messages(self) -> Iterator[Message]:
        for function in self._all:
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS:
                    yield from self._message(call, call.func, function)

    def _message(self, call: ast.Call, method: ast.Attribute, function: AnyFunction) -> Iterator[Message]:
        receiver = ast.unparse(method.value).rpartition(".")[2].lstrip("_")
        logger = self._name.removesuffix(".py").replace("/", ".")
        if receiver == "logger" and method.attr.upper() in LEVELS:
            levels, text = {method.attr.upper()}, call.args[0]
        elif receiver == "logger" and method.attr == "log":
            levels, text = self._levels(call.args[0], function), call.args[1]
        elif receiver == "limiter" and method.attr == "log":
            levels, text = self._levels(call.args[1], function), call.args[2]
        elif receiver in ("reporter", "report") and method.attr.upper() in LEVELS:
            logger, levels, text = "outboxio.worker", {method.attr.upper()}, call.args[0]
        else:
            return
        where = f"{self._name}:{call.lineno}"
        assert isinstance(text, ast.Constant), f"{where}: the message is not a constant"
        assert isinstance(text.value, str), f"{where}: the message is not text"
        assert levels, f"{where}: no level"
        fields = set[str]()
        for keyword in call.keywords:
            assert keyword.arg != "extra", f"{where}: fields are keyword arguments"
            if keyword.arg != "exc_info":
                fields |= {keyword.arg} if keyword.arg else self._fields(keyword.value, function)
        yield Message(logger, ", ".join(sorted(levels, key=LEVELS.index)), text.value, tuple(sorted(fields)))

    def _levels(self, level: ast.expr, function: AnyFunction) -> set[str]:
        """The levels that an expression may give: named in the expression, or where its variable is assigned."""
        found = _names_of_levels(level)
        for node in ast.walk(level):
            if isinstance(node, ast.Name) and node.id in self._functions:
                found |= _names_of_levels(self._functions[node.id])
            elif isinstance(node, ast.Name):
                for value in _assigned(node.id, function):
                    found |= self._levels(value, function)
        return found

    def _fields(self, value: ast.expr, function: AnyFunction) -> set[str]:
        """The names of the fields that an unpacked dictionary may have."""
        if isinstance(value, ast.Dict):
            named = {key.value for key in value.keys if isinstance(key, ast.Constant)}
            nested = [each for key, each in zip(value.keys, value.values, strict=True) if key is None]
            return {str(name) for name in named}.union(*(self._fields(each, function) for each in nested))
        if isinstance(value, ast.IfExp):
            return self._fields(value.body, function) | self._fields(value.orelse, function)
        if isinstance(value, ast.Name):
            return set[str]().union(*(self._fields(each, function) for each in _assigned(value.id, function)))
        text = ast.unparse(value)
        if text.endswith((".log_fields", "._fields_of(run)")):
            return {RUN}
        assert text in _KNOWN, f"{self._name}:{value.lineno}: the fields {text} are not known"
        return set(_KNOWN[text])


def _names_of_levels(node: ast.AST) -> set[str]:
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr in LEVELS}


def _assigned(name: str, function: AnyFunction) -> list[ast.expr]:
    """The expressions that a function assigns to a variable, and a dictionary of the keys that it sets."""
    found: list[ast.expr] = []
    for node in ast.walk(function):
        targets: list[Any] = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value: Any = getattr(node, "value", None)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or value is None:
            continue
        for target in targets:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for one, its in pairs:
                if isinstance(one, ast.Name) and one.id == name:
                    found.append(its)
                elif isinstance(one, ast.Subscript) and ast.unparse(one.value) == name:
                    found.append(ast.Dict(keys=[one.slice], values=[its]))
    return found


def table() -> str:
    rows = ["| logger | level | message | fields |", "|---|---|---|---|"]
    for one in messages():
        text, fields = one.text.replace("|", r"\|"), ", ".join(one.fields)
        fence = "``" if "`" in text else "`"
        rows.append(f"| `{one.logger}` | {one.levels} | {fence}{text}{fence} | {fields} |")
    return "\n".join(rows)


def main() -> None:
    print(table())
    if "--write" in sys.argv:
        text = PAGE.read_text("utf-8")
        before, heading, _ = text.partition(HEADING)
        PAGE.write_text(f"{before}{heading}\n\n{table()}\n", "utf-8")


if __name__ == "__main__":
    main()
