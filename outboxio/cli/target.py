"""The outbox of a command: ``module:outbox`` in the application's code, or a database URL."""

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
from outboxio.settings import Settings, given_settings
from outboxio.support.text import without_passwords

_EXPECTED = "expected module:outbox, as in app.main:outbox, or a database URL"
_NO_TARGET = (
    "Name an outbox of yours (module:outbox) or a database (--database URL), set OUTBOXIO_TARGET, or write target = "
    '"module:outbox" into the table tool.outboxio of pyproject.toml'
)
_KEYS = ("target", "namespace")

_ENDS = (KeyboardInterrupt, asyncio.CancelledError)
"""What ends the command, and is no fault of the module that is imported."""
_LIKE_A_TARGET = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*|[\w+]+://.*", re.DOTALL)
_LOOPS = ("asyncio", "anyio", "uvloop", "trio")  # each raises RuntimeError inside a running event loop
_ANY_NAMESPACE = "outboxio"  # the tables are the same for every namespace


class TargetError(ConfigurationError):
    """There is no outbox where the command was told to look."""


class Named(Struct, frozen=True):
    """The outbox that a command works on: an outbox of the application, or a database and a namespace."""

    target: str | None = None
    """``module:outbox``, or a database URL."""
    namespace: str | None = None
    words: Sequence[str] = ()
    """The words of the command line behind the target."""
    needs_rows: bool = False
    """True for a command that works on the rows of the namespace: a namespace without rows is a mistake."""

    @property
    def url(self) -> str | None:
        """The database URL, unless the target is an outbox of the application."""
        return self.target if self.target is not None and "://" in self.target else None


def named(
    words: Sequence[str], database: str | None, namespace: str | None, *, environ: Mapping[str, str] = os.environ
) -> Named:
    """The outbox that the command line names, or else ``OUTBOXIO_TARGET``, or else ``pyproject.toml``.

    The first word is the target if it looks like ``module:outbox`` or like a URL. ``--database`` is a target too.
    Raises :class:`TargetError` without any target, and with two.
    """
    first, *rest = words or ("",)
    is_target = _LIKE_A_TARGET.fullmatch(first) is not None
    if is_target and database is not None:
        raise TargetError(f"{first!r} and --database name two outboxes; give one of them, and not both")
    if is_target:
        return Named(first, namespace, rest)
    elsewhere = _elsewhere(environ)
    target = database or elsewhere.get("target")
    if target is None:
        raise TargetError(_NO_TARGET if not first else f"{first!r} names no outbox: {_EXPECTED}. {_NO_TARGET}")
    return Named(target, namespace or elsewhere.get("namespace"), list(words))


@asynccontextmanager
async def opened(named: Named) -> AsyncGenerator[Outbox]:
    """The outbox that the command line names; closed at the end.

    Raises :class:`TargetError` for a target that does not exist or is no outbox, and for a database without the
    namespace if the command needs its rows. Errors of outboxio in the imported
    module, such as :class:`SettingsError`, pass through.
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
    """Raise :class:`TargetError` for a database without a namespace, because rows of one service are asked for."""
    if named.url is not None and named.namespace is None:
        raise TargetError("a database may have rows of several services: give --namespace, or set OUTBOXIO_NAMESPACE")


def _elsewhere(environ: Mapping[str, str]) -> dict[str, str]:
    """The target and the namespace from the environment, or else from the nearest ``pyproject.toml``."""
    given = {key: environ[f"OUTBOXIO_{key.upper()}"] for key in _KEYS if environ.get(f"OUTBOXIO_{key.upper()}")}
    return given if "target" in given else _in_project() | given


def _in_project() -> dict[str, str]:
    table = project_table()
    return {key: str(table[key]) for key in _KEYS if key in table}


def project_table() -> Mapping[str, Any]:
    """The table ``tool.outboxio`` of the nearest ``pyproject.toml``; empty without one.

    Raises :class:`SettingsError` for an unknown key and a bad value.
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
    """The settings in ``pyproject.toml`` and the environment, whether the application reads them or not.

    Raises :class:`SettingsError` for an unknown setting and a bad value.
    """
    return given_settings({"tool": {"outboxio": project_table()}}, os.environ)


def _is_file(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file()


async def _outbox_of(target: str) -> Outbox:
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise TargetError(f"{target!r} names no outbox: {_EXPECTED}")
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
    except (OutboxError, *_ENDS):
        raise
    except BaseException as error:
        raise TargetError(f"calling {target}() failed: {_shortly(error)}") from error


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except (OutboxError, *_ENDS):
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(f"there is no module {name!r}, neither in {os.getcwd()} nor installed") from error
        raise TargetError(f"importing {name} failed: there is no module {error.name!r}") from error
    except BaseException as error:
        if _starts_event_loop(error):
            raise TargetError(
                f"importing {name} failed: the module runs an event loop when it is imported: "
                'put that call below `if __name__ == "__main__":` at the end of the module'
            ) from error
        raise TargetError(f"importing {name} failed: {_shortly(error)}") from error


def _starts_event_loop(error: BaseException) -> bool:
    """True for ``asyncio.run(main())`` in a module, as in a script. The coroutine that will never run is closed."""
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
        return f"the code called sys.exit({'' if error.code is None else repr(error.code)}) (--verbose says where)"
    return f"{type(error).__name__}: {error} (--verbose says where)"


def _instead(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Outbox)]
    return f"; its outboxes: {', '.join(f'{module.__name__}:{name}' for name in names)}" if names else ""
