"""The settings of an outbox, in a frozen struct, and the sources of their values.

The fields of the struct are the only list of settings: spellings, environment variables, conversions and checks derive
from their names and types. To add a setting, add a field, and a line in ``_RANGES`` if its bounds are unusual.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeGuard, get_args

import msgspec

from outboxio.errors import SettingsError
from outboxio.support.duration import Duration, default_duration, format_duration, parse_duration
from outboxio.support.text import nearest

Balance = Literal["partitioned", "all"]
"""Which handlers are distributed over the processes: those with several partitions, or all."""


class _SettingsMeta(msgspec.StructMeta):
    # Hidden from type checkers, which check calls against the fields.
    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **leafs: Any) -> Any:
            for name, value in leafs.items():
                if name not in self.__struct_fields__:
                    raise SettingsError(name, value, _expected_instead_of(_snake_case(name)))
            return super().__call__(*args, **leafs)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_SettingsMeta):
    """The configuration of an outbox. The defaults are suitable for production.

    Durations are stored as ``timedelta``, and may be given as a ``timedelta``, as seconds (``0.5``), as ``"20ms"`` or
    ``"1h30m"``, or in ISO-8601 (``"PT1S"``). Unless noted otherwise, they must be longer than zero and at most 100
    years, and numbers must be 1 or more. An unknown setting, or a value out of bounds, raises
    :class:`~outboxio.errors.SettingsError` with the name, the value and what was expected.

    Example::

        settings = Settings(fanout_poll_delay="250ms", concurrency=20)
        settings.fanout_poll_delay == timedelta(milliseconds=250)

        settings = Settings.load("outboxio.toml")     # and the environment: OUTBOXIO_CONCURRENCY=50
        outbox = Outbox("sqlite:///app.db", namespace="wallets", settings=settings)
    """

    fanout_poll_delay: Duration = default_duration("1s")
    """Polling interval of fan-out when it is idle (jittered). 1 ms to 1 day."""

    fanout_batch_size: int = 1000
    """Maximum number of events per fan-out transaction."""

    handling_enabled: bool = True
    """Whether this process runs handlers. False for a deployment that only fans out."""

    handling_poll_delay: Duration = default_duration("1s")
    """Polling interval of the dispatcher when it is idle (jittered). 1 ms to 1 day.

    It bounds the delay of notifications that become due at a later time, and of those written without a wake-up. On
    MySQL, MariaDB and SQLite, processes send no wake-ups to each other."""

    handling_batch_size: int = 1000
    """Maximum number of due notifications that the dispatcher reads at once."""

    handling_max_backoff_cap: Duration = default_duration("5m")
    """Maximum delay between two attempts of a failing handler. A ``RetryPolicy`` may set its own."""

    # A window shorter than the backoff cap is allowed: an attempt outside the window means EXPIRED.
    handling_retention_window: Duration = default_duration("7d")
    """Time after which an unfinished notification becomes EXPIRED, from its first possible run or a manual retry."""

    handler_timeout: Duration = default_duration("60s")
    """Time after which a run of a handler is cancelled and counted as a failure. If the event loop is blocked for
    longer than the longest timeout of all handlers in this process, the process releases its cluster locks."""

    concurrency: int = 100
    """Maximum number of concurrent handler runs per shard in this process; hooks do not count."""

    max_hops: int = 32
    """Maximum length of a chain of events that cause further events. It stops handlers that trigger each other."""

    max_crashes: int = 3
    """Number of times the process may die while a row is running before the row becomes DEAD. Counting begins after a
    first crash. 1 has the effect of 2: other rows run during the first counted start, so it does not prove that this
    row caused the crash."""

    outcome_batch: int = 500
    """Maximum number of outcomes that are written together."""

    outcome_delay: Duration = default_duration("20ms")
    """Maximum time that an outcome is buffered so that several are written together. Zero disables buffering. After a
    crash, handlers whose outcomes were not written run again."""

    shutdown_timeout: Duration = default_duration("25s")
    """Grace period for running handlers after ``running()`` is left, before they are cancelled. Zero: none.
    Kubernetes kills a pod after 30 s; the remaining seconds are for writing outcomes and releasing locks."""

    pool_timeout: Duration = default_duration("30s")
    """Time that an action waits for a connection, or on SQLite for the writer connection, before
    :class:`~outboxio.errors.PoolExhausted` is raised."""

    lock_heartbeat: Duration = default_duration("5s")
    """Heartbeat interval of cluster locks; the server disconnects a holder that sends nothing for 1.8 times as long.
    50 ms to 1 day."""

    lock_sessions: int = 8
    """Maximum number of sessions for ``outbox.lock``, per process and shard. A lock that is held, or waits for another
    process, uses one session; further tasks wait for a free session. Of a user-supplied pool, at most a quarter."""

    balance: Balance = "partitioned"
    """``"partitioned"``: processes share the handlers that have several partitions, and the first process runs all
    others. ``"all"``: handlers with a single partition are distributed over the processes too. Events then need a
    wake-up between processes, which adds 0.5 ms on an idle PostgreSQL, and 16 ms on an idle MySQL or MariaDB."""

    spread_after: Duration = default_duration("10s")
    """Time for which a handler with ``partitions="auto"`` must have had a backlog, of notifications due for more than
    a second, before it is shared among the processes that have it."""

    subscription_ttl: Duration = default_duration("7d")
    """Time for which a handler still gets notifications after the last process that had it is gone."""

    failing_alert_after: Duration = default_duration("1h")
    """Time after which the overview and ``outboxio doctor`` report a failing notification."""

    connect_timeout: Duration = default_duration("10s")
    """Timeout for opening a connection to a server."""

    statement_timeout: Duration = default_duration("60s")
    """Timeout for the statements that outboxio itself runs, including BEGIN, COMMIT and those of the loops. When it
    expires, the connection is closed."""

    action_statement_timeout: Duration = default_duration("0s")
    """Timeout for the statements of an action's own code, which then raise TimeoutError. Zero: no timeout, as long as
    the server is working on the statement."""

    notify: bool = True
    """Whether a commit wakes the other processes, if the database supports it (PostgreSQL). Polling continues."""

    record_empty_actions: bool = True
    """Whether an action that emits no events writes a sentinel row to ``events``."""

    validate_events: bool = True
    """Whether an event's field values are checked against their types before the event is written."""

    purge_enabled: bool = True
    """Whether ``running()`` purges rows that are past their retention. ``outbox.admin.purge()`` works in any case."""

    keep_finished: Duration = default_duration("7d")
    """Age at which finished notifications and fully settled events are removed."""

    keep_dead: Duration = default_duration("90d")
    """Age at which DEAD notifications are removed."""

    dedup_retention: Duration = default_duration("100d")
    """Time for which the inbox detects duplicates of a message. Usually longer than events are kept."""

    def __post_init__(self) -> None:
        for leaf in _LEAFS:
            msgspec.structs.force_setattr(self, leaf, _checked(leaf, getattr(self, leaf), key=leaf))

    @classmethod
    def load(
        cls,
        source: Mapping[str, object] | str | Path | None = None,
        environ: Mapping[str, str] | None = os.environ,
    ) -> Self:
        """Load settings from a mapping or a TOML file, overridden by the environment.

        ``source``: a mapping, the path of a TOML file, or None. The settings are the table ``outboxio`` of the source,
        or else the table ``tool.outboxio``, or else the whole source. Names may be in snake_case, kebab-case or
        camelCase, and nested at any word boundary: ``handling_poll_delay``, ``handling-poll-delay``,
        ``handlingPollDelay`` and ``{"handling": {"poll-delay": ...}}`` are the same setting, which may be given once.

        ``environ``: variables such as ``OUTBOXIO_HANDLING_POLL_DELAY``; None reads none. ``OUTBOXIO_DATABASE``,
        ``OUTBOXIO_TARGET``, ``OUTBOXIO_NAMESPACE``, ``OUTBOXIO_WEBHOOK``, ``OUTBOXIO_TEST_*`` and the variables that
        Kubernetes sets for a service, such as ``OUTBOXIO_SERVICE_HOST``, are not settings. ``Outbox(...)`` without
        ``settings`` calls ``Settings.load()``.

        Text is converted: durations as above, numbers (``"50"``), and booleans (``"true"``, ``"yes"``, ``"on"``,
        ``"1"`` and their opposites).

        Raises :class:`~outboxio.errors.SettingsError`, with the name as spelled in the source, for a name that is
        unknown or given twice and for an invalid value; and with the path for a file that cannot be read.

        Example::

            Settings.load("pyproject.toml")
            Settings.load({"handling": {"enabled": False}}, environ={"OUTBOXIO_CONCURRENCY": "50"})
        """
        return cls(**settings_from(source, environ))


_LEAFS: Final[Mapping[str, type[Any]]] = {field.name: field.type for field in msgspec.structs.fields(Settings)}


# --- bounds of values -----------------------------------------------------------------------------

_MICROSECOND: Final = timedelta(microseconds=1)
_DAY: Final = timedelta(days=1)
# It must be possible to subtract the longest duration from the current time, in Python and on the servers.
_CENTURY: Final = timedelta(days=36_500)

# The largest value of the smallest integer type of all databases: the numbers become limits of statements.
_LARGEST_NUMBER: Final = 2**31 - 1

_RANGES: Final[Mapping[str, tuple[timedelta, timedelta]]] = {
    # An idle loop must not become a busy loop, and polling must find rows whose wake-up was lost.
    "fanout_poll_delay": (timedelta(milliseconds=1), _DAY),
    "handling_poll_delay": (timedelta(milliseconds=1), _DAY),
    # The server disconnects a holder that sends nothing for nearly two heartbeats. With a shorter interval, a pause of
    # the garbage collector or the network costs the lock; with a longer one, a frozen holder keeps it for days.
    "lock_heartbeat": (timedelta(milliseconds=50), _DAY),
    "action_statement_timeout": (timedelta(0), _CENTURY),
    "outcome_delay": (timedelta(0), _CENTURY),
    "shutdown_timeout": (timedelta(0), _CENTURY),
}


def _checked(leaf: str, value: object, *, key: str) -> object:
    return _CHECKS[_LEAFS[leaf]](leaf, value, key)


def _checked_duration(leaf: str, value: object, key: str) -> timedelta:
    shortest, longest = _RANGES.get(leaf, (_MICROSECOND, _CENTURY))
    duration = parse_duration(value, key=key)
    if not shortest <= duration <= longest:
        raise SettingsError(key, value, f"a duration from {format_duration(shortest)} to {format_duration(longest)}")
    return duration


def _checked_number(leaf: str, value: object, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsError(key, value, "a whole number, 1 or more")
    if value > _LARGEST_NUMBER:
        raise SettingsError(key, value, f"a whole number, {_LARGEST_NUMBER:,} at most")
    return value


def _checked_switch(leaf: str, value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(key, value, "true or false")
    return value


def _checked_choice(leaf: str, value: object, key: str) -> str:
    choices: tuple[str, ...] = get_args(_LEAFS[leaf])
    if not isinstance(value, str) or value not in choices:
        meant = nearest(value.strip().lower(), choices) if isinstance(value, str) else None
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise SettingsError(key, value, f"one of {', '.join(map(repr, choices))}{hint}")
    return value


_CHECKS: Final[Mapping[object, Callable[[str, object, str], object]]] = {
    timedelta: _checked_duration,
    int: _checked_number,
    bool: _checked_switch,
    Balance: _checked_choice,
}


# --- sources of values ---------------------------------------------------------------------------

_NOT_SHOWN: Final = "<not shown>"
"""Replaces the value of an unknown variable or key, which may be a secret, such as OUTBOXIO_DATABASE_URL."""
_PREFIX: Final = "OUTBOXIO_"
_RESERVED: Final = {
    "OUTBOXIO_DATABASE",
    "OUTBOXIO_TARGET",
    "OUTBOXIO_NAMESPACE",
    "OUTBOXIO_WEBHOOK",
}  # used by the examples and the command line
_KUBERNETES_VARIABLES: Final = re.compile(
    r"OUTBOXIO_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""The variables of a service named ``outboxio`` or ``outboxio-...``, which every pod of its namespace gets."""
_OF_COMMAND_LINE: Final = ("target", "namespace")
"""Keys in the table ``tool.outboxio`` of ``pyproject.toml`` that select the outbox for the command line."""


def settings_from(
    source: Mapping[str, object] | str | Path | None, environ: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return the settings from a source and the environment, without defaults. See :meth:`Settings.load`."""
    from_source = {} if source is None else _from_table(_table_of(source))
    return from_source | _from_environ(environ or {})


def _table_of(source: Mapping[str, object] | str | Path) -> Mapping[str, object]:
    everything = source if isinstance(source, Mapping) else _toml(source)
    tool = everything.get("tool")
    if "outboxio" in everything and _is_table(tool) and _has_settings(tool.get("outboxio", {})):
        raise SettingsError(
            "tool.outboxio", _NOT_SHOWN, "one table of settings; the same source has the table outboxio as well"
        )
    if "outboxio" in everything:
        return _table("outboxio", everything["outboxio"])
    if _is_table(tool) and "outboxio" in tool:
        table = _table("tool.outboxio", tool["outboxio"])
        return {key: value for key, value in table.items() if key not in _OF_COMMAND_LINE}
    return everything


def _toml(source: Any) -> dict[str, Any]:
    if not isinstance(source, str | Path):  # callers may not be typed
        raise SettingsError("source", source, "a mapping, or the path of a TOML file")
    path = Path(source)
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingsError("source", str(path), f"a file that can be read ({error.strerror})") from error
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise SettingsError("source", str(path), f"a TOML file ({error})") from error


def _table(key: str, value: object) -> Mapping[str, object]:
    if not _is_table(value):
        raise SettingsError(key, _NOT_SHOWN, "a table of settings")
    return value


def _has_settings(table: object) -> bool:
    return not _is_table(table) or any(key not in _OF_COMMAND_LINE for key in table)


def _from_table(table: Mapping[str, object]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for key, value in _flattened(table):
        leaf = _snake_case(key)
        if leaf not in _LEAFS:
            raise SettingsError(key, _NOT_SHOWN, _expected_instead_of(leaf))
        if leaf in seen:
            raise SettingsError(key, value, f"one spelling of {leaf}, which is also given as {seen[leaf]}")
        seen[leaf] = key
        values[leaf] = _checked(leaf, _read(leaf, value), key=key)
    return values


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in filter(_is_ours, environ):
        leaf = key.removeprefix(_PREFIX).lower()
        if leaf not in _LEAFS or key != _variable(leaf):
            raise SettingsError(key, _NOT_SHOWN, _expected_instead_of(leaf, _variable, _OF_COMMAND_LINE))
        values[leaf] = _checked(leaf, _read(leaf, environ[key]), key=key)
    return values


def _is_ours(variable: str) -> bool:
    if not variable.startswith(_PREFIX) or variable in _RESERVED or variable.startswith(f"{_PREFIX}TEST_"):
        return False
    return _KUBERNETES_VARIABLES.fullmatch(variable) is None


def _variable(leaf: str) -> str:
    return f"{_PREFIX}{leaf.upper()}"


def _flattened(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield ``("handling.enabled", x)`` for ``{"handling": {"enabled": x}}``, with keys as spelled in the source."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if _is_table(value) and (value or _is_group(key)):
            yield from _flattened(value, f"{key}.")
        else:
            yield key, value


def _is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping)


def _is_group(key: str) -> bool:
    return any(leaf.startswith(f"{_snake_case(key)}_") for leaf in _LEAFS)


# --- conversion of names and texts ---------------------------------------------------------------

_SWITCHES: Final[Mapping[str, bool]] = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _snake_case(key: str) -> str:
    snake = re.sub(r"(?<=[a-z0-9])[A-Z]", lambda capital: f"_{capital[0].lower()}", key)
    return snake.replace("-", "_").replace(".", "_")


def _read(leaf: str, value: object) -> object:
    """Convert a text to the type of the setting. Invalid text is returned unchanged, and the check refuses it."""
    if not isinstance(value, str) or (reader := _READERS.get(_LEAFS[leaf])) is None:
        return value
    return reader(value)


def _read_number(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _read_switch(text: str) -> bool | str:
    return _SWITCHES.get(text.strip().lower(), text)


_READERS: Final[Mapping[type[Any], Callable[[str], object]]] = {int: _read_number, bool: _read_switch}


def _expected_instead_of(leaf: str, spell: Callable[[str], str] = str, others: Sequence[str] = ()) -> str:
    if meant := nearest(leaf, [*_LEAFS, *others]):
        return f"a known setting; did you mean {spell(meant)}?"
    return f"a known setting: {', '.join(map(spell, _LEAFS))}"
