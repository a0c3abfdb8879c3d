"""The target of a command: ``module:outbox`` in your application's code, or a database URL."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import sys
import tomllib
import traceback
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from outboxio.errors import ConfigurationError, OutboxError
from outboxio.outbox import Outbox
from outboxio.settings import Settings, settings_from
from outboxio.support.text import without_passwords

_EXPECTED = "expected module:outbox, as in app.main:outbox, or a database URL"
_NO_TARGET = (
    "Name an outbox (module:outbox) or a database (--database URL), set OUTBOXIO_TARGET, or add target = "
    '"module:outbox" to the table tool.outboxio of pyproject.toml'
)
_KEYS = ("target", "namespace")

_INTERRUPTS = (KeyboardInterrupt, asyncio.CancelledError)
"""Exceptions that end the command but are not errors of the imported module."""
_LIKE_A_TARGET = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*|[\w+]+://.*", re.DOTALL)
_LOOPS = ("asyncio", "anyio", "uvloop", "trio")  # each raises RuntimeError inside a running event loop
_ANY_NAMESPACE = "outboxio"  # the tables are the same for every namespace


class TargetError(ConfigurationError):
    """The command line is invalid, or names an outbox that does not exist."""


class Named(Struct, frozen=True):
    """The outbox that a command works on: one in your application's code, or a database and a namespace."""

    target: str | None = None
    """``module:outbox``, or a database URL."""
    namespace: str | None = None
    arguments: Sequence[str] = ()
    """The arguments after the target."""
    needs_rows: bool = False
    """True for a command on the rows of the namespace: a namespace without rows is an error."""

    @property
    def url(self) -> str | None:
        """The database URL, unless the target is an outbox in code."""
        return self.target if self.target is not None and "://" in self.target else None


def named(
    arguments: Sequence[str], database: str | None, namespace: str | None, *, environ: Mapping[str, str] = os.environ
) -> Named:
    """Return the outbox named by the command line, else by ``OUTBOXIO_TARGET``, else by ``pyproject.toml``.

    The first argument is the target if it looks like ``module:outbox`` or like a URL. ``--database`` is a target too.
    Raises :class:`TargetError` without a target, and with two.
    """
    first, *rest = arguments or ("",)
    is_target = _LIKE_A_TARGET.fullmatch(first) is not None
    if is_target and database is not None:
        raise TargetError(f"{first!r} and --database name two outboxes; use only one of them")
    if is_target:
        return Named(first, namespace, rest)
    defaults = _defaults(environ)
    target = database or defaults.get("target")
    if target is None:
        raise TargetError(_NO_TARGET if not first else f"{first!r} is not an outbox: {_EXPECTED}. {_NO_TARGET}")
    return Named(target, namespace or defaults.get("namespace"), list(arguments))


@asynccontextmanager
async def opened(named: Named) -> AsyncGenerator[Outbox]:
    """Open the outbox that the command line names, and close it at the end.

    Raises :class:`TargetError` for a target that does not exist or is not an outbox, and for a database without the
    namespace if the command needs its rows. Errors of outboxio in the imported module, such as
    :class:`SettingsError`, are passed through.
    """
    if named.url is not None:
        outbox = Outbox(named.url, namespace=named.namespace or _ANY_NAMESPACE, settings=Settings.load())
    else:
        assert named.target is not None
        outbox = await _outbox_of(named.target)
    try:
        if named.url is not None and named.needs_rows:
            refused = await outbox.admin.unknown_namespace()
            if refused is not None:
                raise TargetError(refused)
        yield outbox
    except Exception as error:
        raise await outbox.admin.explained(error) from error.__cause__
    finally:
        await outbox.close()


def refuse_without_namespace(named: Named) -> None:
    """Raise :class:`TargetError` for a database without a namespace: the command reads the rows of one service."""
    if named.url is not None and named.namespace is None:
        raise TargetError("a database may have rows of several services: use --namespace, or set OUTBOXIO_NAMESPACE")


def _defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the target and the namespace from the environment, or from the nearest ``pyproject.toml``."""
    found = {key: environ[f"OUTBOXIO_{key.upper()}"] for key in _KEYS if environ.get(f"OUTBOXIO_{key.upper()}")}
    return found if "target" in found else _in_project() | found


def _in_project() -> dict[str, str]:
    table = project_table()
    return {key: str(table[key]) for key in _KEYS if key in table}


def project_table() -> Mapping[str, Any]:
    """Return the table ``tool.outboxio`` of the nearest ``pyproject.toml``; empty without one.

    Raises :class:`SettingsError` for an unknown key or an invalid value.
    """
    here = Path.cwd()
    file = next((folder / "pyproject.toml" for folder in (here, *here.parents) if _is_file(folder)), None)
    if file is None:
        return {}
    try:
        table: dict[str, Any] = tomllib.loads(file.read_text("utf-8")).get("tool", {}).get("outboxio", {})
    except (ValueError, OSError, AttributeError) as error:
        raise TargetError(f"{file} cannot be read: {error}") from error
    Settings.load({"tool": {"outboxio": table}}, environ=None)
    return table


def configured() -> Mapping[str, Any]:
    """Return the settings of ``pyproject.toml`` and the environment, whether the application reads them or not.

    Raises :class:`SettingsError` for an unknown setting or an invalid value.
    """
    return settings_from({"tool": {"outboxio": project_table()}}, os.environ)


def _is_file(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file()


async def _outbox_of(target: str) -> Outbox:
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise TargetError(f"{target!r} is not an outbox: {_EXPECTED}")
    module = _module(module_name)
    found = _attribute(module, path)
    if callable(found) and not _takes_arguments(found):
        found = await _called(target, found)
    if not isinstance(found, Outbox):
        kind = f"a {type(found).__name__}" if callable(found) else without_passwords(repr(found))
        raise TargetError(f"{target} is {kind}, neither an Outbox nor a callable that returns one{_instead(module)}")
    return found


def _takes_arguments(found: Callable[..., Any]) -> bool:
    """True for a callable object that needs arguments, such as an ASGI application."""
    if inspect.isroutine(found) or isinstance(found, type):
        return False
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):
        return True
    return False


async def _called(target: str, make: Callable[[], Any]) -> Any:
    try:
        made = make()
        return await made if inspect.isawaitable(made) else made
    except (OutboxError, *_INTERRUPTS):
        raise
    except BaseException as error:
        raise TargetError(f"calling {target}() failed: {_shortly(error)}") from error


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except (OutboxError, *_INTERRUPTS):
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(f"no module named {name!r}, neither in {os.getcwd()} nor installed") from error
        raise TargetError(f"importing {name} failed: no module named {error.name!r}") from error
    except BaseException as error:
        if _starts_event_loop(error):
            raise TargetError(
                f"importing {name} failed: the module runs an event loop when it is imported; "
                'move that call below `if __name__ == "__main__":` at the end of the module'
            ) from error
        raise TargetError(f"importing {name} failed: {_shortly(error)}") from error


def _starts_event_loop(error: BaseException) -> bool:
    """True for ``asyncio.run(main())`` at module level. Closes the coroutine, which will never run."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not isinstance(error, RuntimeError) or frame.f_globals.get("__name__", "").partition(".")[0] not in _LOOPS:
        return False
    for value in frame.f_locals.values():
        if inspect.iscoroutine(value):
            value.close()
    return True


def _attribute(module: ModuleType, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise TargetError(f"module {module.__name__} has no {path!r}{_instead(module)}") from error
    return found


def _shortly(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return (
            f"the code called sys.exit({'' if error.code is None else repr(error.code)}) (use --verbose to see where)"
        )
    return f"{type(error).__name__}: {error} (use --verbose to see where)"


def _instead(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Outbox)]
    return f"; its outboxes: {', '.join(f'{module.__name__}:{name}' for name in names)}" if names else ""
