"""The log: every entry is a single line, and untrusted text cannot forge an entry.

An entry is a constant message with arguments, and fields: the keyword arguments of the call, as attributes of the
record, each with the prefix ``outboxio_``. docs/reference/logs.md lists all messages with their fields.

Names, sources and errors are untrusted. A line break in such a text would forge an entry, and an escape sequence would
reach the reader's terminal. So every logger of the package is a :class:`Log`, which escapes all arguments. For an
undecodable payload, the log contains the path and the expected type, but not the value.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
import typing
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import msgspec

from outboxio.errors import InvalidEvent

MAX_SHOWN = 500
"""The maximum length of an error in a log line, in characters."""
MAX_CAUSES = 5  # causes of an error that are shown with a stack
MAX_FRAMES = 20  # frames of a stack that is shown on one line
Fields = dict[str, Any]
"""Fields of a log entry, without the prefix; a field that is ``None`` is left out."""
PREFIX = "outboxio_"
"""The prefix of every field name."""

_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"

# How messages start in which msgspec quotes a value of the payload, or the name of an unknown field.
_QUOTES_VALUE = re.compile(r"Invalid enum value|Invalid value|Object contains unknown field")
_LOCATION = re.compile(r" - at (?:`key` in )?`\$[^`\s]*`\Z")
_CORE_OF_PYDANTIC = "pydantic_core._pydantic_core"
_QUOTING_OF_PYDANTIC = ("value_error", "assertion_error", "union_tag_invalid")
_MAX_PROBLEMS = 3  # fields that a log line names if Pydantic rejects a payload
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_NO_TRACE = "0" * 32

_shared: ContextVar[Mapping[str, object]] = ContextVar("outboxio_log_fields", default=MappingProxyType({}))
"""The fields of all entries that are written in this context."""

_of_run: Callable[[], Mapping[str, object]] = dict[str, object]


def log_of(module: str) -> Log:
    """Return the logger of a module of this package: ``logger = log_of(__name__)``."""
    return Log(logging.getLogger(module))


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger that writes each entry on a single line.

    Text is escaped, and errors are shown as :func:`log_text`. A stack (``exc_info``) has files, lines and functions,
    with each error as :func:`log_text`. All other keyword arguments are fields.

    Example::

        logger.warning("handler %r failed", name, handler=name, attempt=1)  # the record has outboxio_handler
    """

    def log(
        self,
        level: int,
        msg: object,
        *args: object,
        exc_info: Any = None,
        stack_info: bool = False,
        stacklevel: int = 1,
        extra: Mapping[str, object] | None = None,
        **fields: object,
    ) -> None:
        if not self.isEnabledFor(level):
            return
        stack = without_text(exc_info) if isinstance(exc_info, BaseException) else None
        attributes = {**as_fields(fields), **(extra or {})}
        self.logger.log(
            level, msg, *map(_safe, args), exc_info=stack, stack_info=stack_info, stacklevel=stacklevel + 1,
            extra=attributes,
        )  # fmt: skip


def as_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields as attributes of a record, with the shared fields. Fields without a value are left out.

    An entry during a run gets the fields of the run, unless it has a handler field itself.
    """
    every = {**_shared.get(), **fields}
    own = {PREFIX + name: _value(value) for name, value in every.items() if value is not None}
    return own if "handler" in fields else {**_of_run(), **own}


def take_run_fields_from(source: Callable[[], Mapping[str, object]]) -> None:
    """Set the function that returns the fields, with prefix, of the current run."""
    global _of_run
    _of_run = source


@contextmanager
def shared_fields(**fields: object) -> Generator[None]:
    """Add fields to all entries of the block, including those of tasks that it starts."""
    token = _shared.set({**_shared.get(), **fields})
    try:
        yield
    finally:
        _shared.reset(token)


def trace_id_in(traceparent: object) -> str | None:
    """Return the trace id in a W3C Trace Context header, 32 hexadecimal digits; ``None`` without a valid header."""
    match = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
    return None if match is None or match[1] == _NO_TRACE else match[1]


def current_trace_id() -> str | None:
    """Return the trace id of OpenTelemetry's current span; ``None`` unless your application uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    try:
        span = trace.get_current_span()
        context = span.get_span_context()
        # A task may have been started within a span that has ended since.
        has_ended = getattr(span, "end_time", None) is not None
        return f"{context.trace_id:032x}" if context.is_valid and not has_ended else None
    except Exception:  # a log entry must not fail because of another library
        return None


def one_line(text: str, longest: int = sys.maxsize) -> str:
    """Return ``text`` on a single line, cut to ``longest`` characters, with all unprintable characters escaped.

    Unprintable characters are line breaks of all kinds, terminal escapes, NUL, lone surrogates and marks that change
    the writing direction.

    Example::

        one_line("paid\\n2030-01-01 ERROR forged") == r"paid\\n2030-01-01 ERROR forged"
    """
    shortened = text if len(text) <= longest else text[: longest + 1]
    if not shortened.isprintable():
        shortened = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shortened)
    return shortened if len(shortened) <= longest else f"{shortened[: longest - 1]}{_ELLIPSIS}"


def _unchanged(text: str) -> str:
    return text


def log_text(error: BaseException, redact: Callable[[str], str] = _unchanged) -> str:
    """Return an error on a single line of limited length, without values of a payload. Never raises."""
    try:
        return one_line(redact(_describe(error)), MAX_SHOWN)
    except BaseException:  # the __repr__ of the error has failed
        return one_line(f"<unprintable {type_name(error)}>", MAX_SHOWN)


def type_name(error: BaseException) -> str:
    """Return the class name of an error, with its module unless it is a built-in or outboxio's."""
    cls = type(error)
    try:
        name, module = str(cls.__qualname__), str(cls.__module__)
    except BaseException:  # the class may have no module, or a metaclass that raises
        return "an exception whose class has no name"
    if module == _CORE_OF_PYDANTIC:
        module = "pydantic"  # the module from which the class is imported
    return name if module in ("builtins", "outboxio.errors") else f"{module}.{name}"


def without_value(error: BaseException) -> str:
    """Return the message of a decoding error: the path and the expected type, without the value."""
    message = str(error)
    found = _LOCATION.search(message)
    where = found[0] if found else ""
    if error.__cause__ is not None:  # raised by a validator of the user's class, with any text
        return f"rejected by a validator of its class{where}"
    quoting = _QUOTES_VALUE.match(message)
    return f"{quoting[0]}{where}" if quoting else message


def is_pydantic_error(error: BaseException) -> bool:
    """Return True for a ``pydantic.ValidationError``, without importing Pydantic."""
    return type(error).__name__ == "ValidationError" and type(error).__module__ == _CORE_OF_PYDANTIC


def problems_in(error: Any, *, with_texts: bool) -> str:
    """Return what Pydantic rejects on one line, each with its path: ``Field required - at `$.order_id```.

    ``with_texts=False`` leaves out messages that may quote values: those of user-supplied validators.
    """
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [_problem(one, with_texts) for one in problems[:_MAX_PROBLEMS]]
    more = len(problems) - len(shown)
    return "; ".join([*shown, f"and {more} more"] if more else shown)


def _problem(problem: Any, with_texts: bool) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
    where = f" - at `${path}`" if path else ""
    if with_texts or not _may_quote(problem["type"]):
        return f"{problem['msg']}{where}"
    return f"rejected by a validator of its class{where}"


def _may_quote(problem: str) -> bool:
    from pydantic_core.core_schema import ErrorType

    return problem in _QUOTING_OF_PYDANTIC or problem not in typing.get_args(ErrorType)


def location_of(error: BaseException) -> str:
    """Return where an error was raised: file, line and function."""
    try:
        frames = traceback.extract_tb(error.__traceback__, limit=-1)
    except BaseException:  # the class of the error forbids access to the stack
        frames = traceback.StackSummary()
    return stack_line(frames) or "an unknown location"


def stack_line(frames: list[traceback.FrameSummary]) -> str:
    """Return a stack on a single line, innermost call first."""
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in reversed(frames)]
    return " < ".join(one_line(line, MAX_SHOWN) for line in lines[:MAX_FRAMES])


class Logged(Exception):
    """An error for the log: the text of :func:`log_text`, with the stack of the error."""


def without_text(error: BaseException, causes: int = MAX_CAUSES) -> Logged:
    """Return an error and its causes for the log, each as :func:`log_text` with a stack."""
    logged = Logged(log_text(error))
    try:
        logged.__traceback__ = error.__traceback__
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    except BaseException:  # the class of the error forbids access to the stack
        return logged
    if cause is not None and causes:
        logged.__cause__ = without_text(cause, causes - 1)
    return logged


def _safe(argument: object) -> object:
    """Return an argument of a log entry, escaped. Numbers, ids and enum members are safe as they are."""
    if isinstance(argument, BaseException):
        return log_text(argument)
    # A subclass of str could have a __str__ that returns different text.
    return one_line(str.__str__(argument)) if isinstance(argument, str) else argument


def _value(value: object) -> object:
    """Return the value of a field: a number, or escaped text."""
    return value if isinstance(value, int | float) else one_line(str(value))


def _describe(error: BaseException) -> str:
    """Return the ``repr`` of an error, without values of a payload."""
    kind = type(error)
    if issubclass(kind, msgspec.ValidationError):
        return f"{kind.__name__}({without_value(error)!r})"
    if is_pydantic_error(error):
        return f"{kind.__name__}({problems_in(error, with_texts=False)!r})"
    if issubclass(kind, InvalidEvent):
        return f"{kind.__name__}({error.without_value!r})"  # type: ignore[attr-defined]  # InvalidEvent has this attribute
    if issubclass(kind, UnicodeError):
        return f"{kind.__name__}({str(error)!r})"  # the repr would quote the whole text
    return repr(error)
