"""Count function calls and bytecode instructions."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import outboxio
from tests.costs import still, traffic
from tests.kit import wire

OWN, OTHER, IGNORED = range(3)
#: Python 3.12 has no frames for comprehensions, and Python 3.11 enters a generator again when it is closed early.
NOT_CALLS = frozenset(("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"))
#: Written in C from Python 3.12 on.
IN_C = frozenset((asyncio.current_task.__code__,)) if hasattr(asyncio.current_task, "__code__") else frozenset()
FOLDER = str(Path(outboxio.__file__).parent)
#: The tests' own code, which runs in place of drivers, threads and clocks.
COUNTING = frozenset(module.__file__ for module in (still, traffic, wire))


class Calls:
    """Counts, within a ``with`` block, the calls of Python functions by outboxio's code or of outboxio's code.

    Calls between functions of other packages are not counted, because their number depends on the version of Python.
    Nor are generator expressions. A coroutine that continues is called again, as it is by the interpreter.
    ``instructions`` are those of outboxio's code alone, and only counted on request, because that is slow.
    """

    def __init__(self, *, with_instructions: bool) -> None:
        self.by_function: Counter[CodeType] = Counter()
        self._kinds: dict[CodeType, int] = {}
        self._instruction, self._instructions = _counter()
        self._local = self._instruction if with_instructions else None

    @property
    def number(self) -> int:
        return sum(self.by_function.values())

    @property
    def instructions(self) -> int:
        return self._instructions()

    def __enter__(self) -> Calls:
        self._former = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._former)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        kind = self._kind(code)
        if kind == OWN:
            if code.co_name not in NOT_CALLS:
                self.by_function[code] += 1
            if self._local is not None:
                frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return self._local
        if kind == OTHER and frame.f_back is not None and self._kind(frame.f_back.f_code) == OWN:
            self.by_function[code] += 1
        return None

    def _kind(self, code: CodeType) -> int:
        kind = self._kinds.get(code)
        if kind is None:
            file = code.co_filename
            kind = OWN if file.startswith(FOLDER) else IGNORED if file in COUNTING or code in IN_C else OTHER
            self._kinds[code] = kind
        return kind


def _counter() -> tuple[Callable[[FrameType, str, Any], Any], Callable[[], int]]:
    """A trace function that counts instructions, and a function that returns their number. They are called often."""
    number = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal number
        if event == "opcode":
            number += 1
        return trace

    return trace, lambda: number
