"""The state of the process that a test may change for itself, and never for the next test.

The hooks compare the state before the setup of a test with the state after its teardown: a difference fails the test
that caused it, and is undone, so that no later test fails in its place.
"""

from __future__ import annotations

import asyncio
import gc
import locale
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from outboxio.telemetry.protocol import remove_from_process
from tests.kit.inside import telemetry_of_process


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEFORE] = State()
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that changes the state of the process for the next test."""
    yield
    before, after = item.stash[_BEFORE], State()
    if left := before.changes(after):
        before.restore(after)
        pytest.fail("the test changes the process for later tests:\n" + "\n".join(left), pytrace=False)


@dataclass(frozen=True)
class Part:
    """A part of the state: ``read`` returns named values, ``restore`` sets one of them (``None``: remove it)."""

    read: Callable[[], dict[str, Any]]
    restore: Callable[[str, Any], object]


class State:
    """The values of all parts at one time."""

    def __init__(self) -> None:
        self._values = {name: part.read() for name, part in PARTS.items()}

    def changes(self, after: State) -> list[str]:
        """The values that a later state has changed, one line each."""
        return [
            f"{part} {name!r}: {_shown(old)} before, {_shown(new)} after"
            for part, name, old, new in self._differing(after)
        ]

    def _differing(self, after: State) -> Iterator[tuple[str, str, Any, Any]]:
        for part, old in self._values.items():
            new = after._values[part]
            if old != new:
                for name in old.keys() | new.keys():
                    if old.get(name) != new.get(name):
                        yield part, name, old.get(name), new.get(name)

    def restore(self, after: State) -> None:
        """Undo the changes between this state and a later one."""
        for part, name, old, _ in self._differing(after):
            PARTS[part].restore(name, old)


_BEFORE = pytest.StashKey[State]()


@contextmanager
def restored() -> Iterator[None]:
    """Undo all changes of the block: for tests that run a command or a program in their process."""
    before = State()
    try:
        yield
    finally:
        before.restore(State())


def _shown(value: Any) -> str:
    return "absent" if value is None else repr(value)


# --- logging -------------------------------------------------------------------------------------

_UNCONFIGURED = (logging.NOTSET, (), (), True, False)


def _loggers() -> dict[str, Any]:
    """The configured loggers, and the configuration of the module."""
    loggers = [logging.root, *filter(_may_be_configured, logging.root.manager.loggerDict.values())]
    configured = {each.name: found for each in loggers if (found := _configuration(each)) != _UNCONFIGURED}
    return {**configured, "logging.disable": (logging.root.manager.disable,)}


def _may_be_configured(logger: Any) -> bool:
    """False for most loggers: a process has hundreds, and each test looks at them twice."""
    return isinstance(logger, logging.Logger) and bool(
        logger.level or logger.handlers or logger.filters or logger.disabled or not logger.propagate
    )


def _configuration(logger: logging.Logger) -> tuple[Any, ...]:
    handlers = tuple(each for each in logger.handlers if not _is_neutral(each))
    return logger.level, handlers, tuple(logger.filters), logger.propagate, logger.disabled


def _is_neutral(handler: logging.Handler) -> bool:
    """True for what pytest adds around each phase of a test, and what libraries add when they are imported."""
    return type(handler).__module__.startswith("_pytest") or type(handler) is logging.NullHandler


def _restore_logger(name: str, configuration: tuple[Any, ...] | None) -> None:
    if name == "logging.disable":
        assert configuration is not None
        logging.disable(configuration[0])
        return
    logger = logging.root if name == "root" else logging.getLogger(name)
    level, handlers, filters, logger.propagate, logger.disabled = configuration or _UNCONFIGURED
    logger.setLevel(level)
    kept = [each for each in logger.handlers if _is_neutral(each)]
    logger.handlers[:] = [*kept, *handlers]
    logger.filters[:] = filters


# --- other state ------------------------------------------------------------------------------------


def _environment() -> dict[str, Any]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value


#: The handlers of these signals cannot be changed, or belong to pytest-timeout.
_FIXED_SIGNALS = {signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM}


_SIGNALS = {each.name: each for each in signal.valid_signals() - _FIXED_SIGNALS if isinstance(each, signal.Signals)}


def _signals() -> dict[str, Any]:
    return {name: signal.getsignal(number) for name, number in _SIGNALS.items()}


def _interpreter() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.14 on
        policy = asyncio.get_event_loop_policy()
    return {
        "event loop policy": policy,
        "working directory": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        # A tracer of OpenTelemetry's SDK adds a filter for its own module.
        "warning filters": [each for each in warnings.filters if "opentelemetry" not in str(each[3])],
        "import path": list(sys.path),
        "excepthook": sys.excepthook,
        "thread excepthook": threading.excepthook,
        "temporary directory": tempfile.tempdir,
        "socket timeout": (socket.getdefaulttimeout(),),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
    }


_SETTERS: dict[str, Callable[[Any], object]] = {
    "event loop policy": asyncio.set_event_loop_policy,
    "working directory": os.chdir,
    "locale": lambda value: locale.setlocale(locale.LC_ALL, value),
    "warning filters": lambda value: warnings.filters.__setitem__(slice(None), value),  # type: ignore[attr-defined]
    "import path": lambda value: sys.path.__setitem__(slice(None), value),
    "excepthook": lambda value: setattr(sys, "excepthook", value),
    "thread excepthook": lambda value: setattr(threading, "excepthook", value),
    "temporary directory": lambda value: setattr(tempfile, "tempdir", value),
    "socket timeout": lambda value: socket.setdefaulttimeout(value[0]),
    "recursion limit": sys.setrecursionlimit,
    "switch interval": sys.setswitchinterval,
    "garbage collection": lambda value: (gc.enable() if value[0] else gc.disable(), gc.set_threshold(*value[1])),
}


def _telemetry() -> dict[str, Any]:
    return {str(id(each)): each for each in telemetry_of_process()}


def _restore_telemetry(name: str, value: Any) -> None:
    for each in telemetry_of_process():
        if value is None and str(id(each)) == name:
            remove_from_process(each)


PARTS = {
    "logger": Part(_loggers, _restore_logger),
    "environment variable": Part(_environment, _restore_variable),
    "handler of signal": Part(_signals, lambda name, value: signal.signal(signal.Signals[name], value)),
    "interpreter": Part(_interpreter, lambda name, value: _SETTERS[name](value)),
    "telemetry of the process": Part(_telemetry, _restore_telemetry),
}
