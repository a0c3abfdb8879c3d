"""Few tests read or wait for real time, and each says why in its mark; the others wait for events or in virtual time.

A helper that reads or waits for time counts for the tests of its file that name it. ``eventually`` does not count.
``python -m pytest --collect-only -q -m real_time`` lists the tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.kit.sources import ROOT, modules, text_of, tree_of

AT_MOST = 100

TESTS = ROOT / "tests"
CLOCKS = {"monotonic", "perf_counter"}
TIME = re.compile(r"\b(?:sleep|time|real_time|monotonic|perf_counter)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def reads_or_waits(call: ast.Call) -> bool:
    """True for a call of a clock, and for a sleep that is not the turn of other tasks (``sleep(0)``)."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "sleep":
        return not (call.args and isinstance(call.args[-1], ast.Constant) and call.args[-1].value == 0)
    return name in CLOCKS or (name == "time" and ast.unparse(call.func) == "time.time")


def waiting_functions(tree: ast.Module) -> set[str]:
    """The functions of a file, outside of classes, that read or wait for time, or name one that does."""
    functions = [node for node in tree.body if isinstance(node, Function)]
    found = {each.name for each in functions if any(map(reads_or_waits, calls(each)))}
    named = {each.name: names(each) for each in functions} if found else {}
    while more := {name for name, others in named.items() if others & found} - found:
        found |= more
    return found


def calls(function: Function) -> Iterator[ast.Call]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Call))


def names(function: Function) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def marks_of(tree: ast.Module, function: Function) -> dict[str, object]:
    """The marks of a test and of its file, each with its first argument."""
    of_file = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    found: dict[str, object] = {}
    for node in (part for mark in (*of_file, *function.decorator_list) for part in ast.walk(mark)):
        mark, arguments = (node.func, node.args) if isinstance(node, ast.Call) else (node, [])
        if isinstance(mark, ast.Attribute) and ast.unparse(mark.value) == "pytest.mark":
            first = [argument.value for argument in arguments[:1] if isinstance(argument, ast.Constant)]
            found[mark.attr] = next(iter(first), found.get(mark.attr))
    return found


@cache
def all_tests() -> dict[str, tuple[bool, dict[str, object]]]:
    """Each test: whether it reads or waits for real time, and its marks. In a simulation all time is virtual.

    Files that have none of the names are left out, because to parse all files takes seconds.
    """
    found = {}
    for path in modules(TESTS):
        if path.name.startswith("test_") and TESTS / "simulation" not in path.parents and TIME.search(text_of(path)):
            tree = tree_of(path)
            waiting = waiting_functions(tree)
            for each in tree.body:
                if isinstance(each, Function) and each.name.startswith("test_"):
                    marks = marks_of(tree, each)
                    is_virtual = "virtual_time" in marks and marks["virtual_time"] is not False
                    found[f"{path.relative_to(ROOT)}::{each.name}"] = each.name in waiting and not is_virtual, marks
    return found


def test_a_test_that_reads_or_waits_for_real_time_says_why() -> None:
    silent = [name for name, (waits, marks) in all_tests().items() if waits and not is_reason(marks.get("real_time"))]
    assert silent == [], 'wait for an event, or add @pytest.mark.virtual_time or @pytest.mark.real_time("why")'


def is_reason(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def test_only_tests_with_real_time_have_the_mark() -> None:
    assert [name for name, (waits, marks) in all_tests().items() if "real_time" in marks and not waits] == []


def test_few_tests_read_or_wait_for_real_time() -> None:
    assert sum(waits for waits, _ in all_tests().values()) <= AT_MOST
