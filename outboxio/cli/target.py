"""The outbox of a command: ``module:outbox`` in the application's code, or a database URL."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from outboxio.errors import ConfigurationError, OutboxError
from outboxio.outbox import Outbox
from outboxio.settings import Settings
from outboxio.support.text import without_passwords

_EXPECTED = "expected module:outbox, as in app.main:outbox"
_ANY_NAMESPACE = "outboxio"  # the tables are the same for every namespace


class TargetError(ConfigurationError):
    """There is no outbox where the command was told to look."""


@asynccontextmanager
async def opened(
    target: str | None, database: str | None = None, namespace: str | None = None
) -> AsyncGenerator[Outbox]:
    """The outbox that the command line names; closed at the end.

    Raises :class:`TargetError` for a target that does not exist or is no outbox. Errors of outboxio in the imported
    module, such as :class:`SettingsError`, pass through.
    """
    outbox = await _outbox_of(target) if target is not None else _outbox_at(database, namespace)
    try:
        yield outbox
    finally:
        await outbox.close()


def refuse_both_or_none(target: str | None, database: str | None) -> None:
    """Raise :class:`TargetError` unless either ``target`` or ``database`` is given."""
    if (target is None) == (database is None):
        raise TargetError("name an outbox of yours (module:outbox), or give --database; one of them, and not both")


def _outbox_at(database: str | None, namespace: str | None) -> Outbox:
    assert database is not None
    return Outbox(database, namespace=namespace or _ANY_NAMESPACE, settings=Settings.load())


async def _outbox_of(target: str) -> Outbox:
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise TargetError(f"{target!r} names no outbox: {_EXPECTED}")
    found = _attribute(_module(module_name), path)
    if callable(found):
        found = await _called(target, found)
    if not isinstance(found, Outbox):
        raise TargetError(
            f"{target} is {without_passwords(repr(found))}, neither an Outbox nor a callable that returns one"
        )
    return found


async def _called(target: str, make: Callable[[], Any]) -> Any:
    try:
        made = make()
        return await made if inspect.isawaitable(made) else made
    except OutboxError:
        raise
    except Exception as error:
        raise TargetError(f"calling {target}() failed: {_shortly(error)}") from error


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except OutboxError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(f"there is no module {name!r}, neither in {os.getcwd()} nor installed") from error
        raise TargetError(f"importing {name} failed: there is no module {error.name!r}") from error
    except Exception as error:
        raise TargetError(f"importing {name} failed: {_shortly(error)}") from error


def _attribute(module: ModuleType, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise TargetError(f"module {module.__name__} has no {path!r}{_instead(module)}") from error
    return found


def _shortly(error: Exception) -> str:
    return f"{type(error).__name__}: {error} (--verbose says where)"


def _instead(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Outbox)]
    return f"; its outboxes: {', '.join(f'{module.__name__}:{name}' for name in names)}" if names else ""
