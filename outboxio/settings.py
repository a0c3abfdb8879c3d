"""The settings: every number and switch of an outbox, in a frozen struct, with the sources of their values.

The struct's fields are the only list of settings. Spellings, environment variables, conversions and checks derive from
the names and types of the fields. A new setting is a field, and a line in ``_RANGES`` if the bounds are unusual.
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
"""The handlers that are spread over the processes: handlers with several partitions, or all handlers."""


class _SettingsMeta(msgspec.StructMeta):
    # Hidden from type checkers, which check calls against the fields.
    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **leafs: Any) -> Any:
            for name, value in leafs.items():
                if name not in self.__struct_fields__:
                    raise SettingsError(name, value, _expected_instead_of(_snake_case(name)))
            return super().__call__(*args, **leafs)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_SettingsMeta):
    """How an outbox behaves. Every setting has a default that suits production.

    A duration is a ``timedelta``. It may be given as a ``timedelta``, as seconds (``0.5``), as ``"20ms"``, ``"1h30m"``,
    or as ISO-8601 (``"PT1S"``). Durations are longer than zero unless said otherwise, and at most 100 years; numbers
    are 1 or more. A setting that is unknown or out of bounds raises :class:`~outboxio.errors.SettingsError` with the
    name, the value and the expected values.

    Example::

        settings = Settings(fanout_poll_delay="250ms", concurrency=20)
        settings.fanout_poll_delay == timedelta(milliseconds=250)

        settings = Settings.load("outboxio.toml")     # and the environment: OUTBOXIO_CONCURRENCY=50
        outbox = Outbox("sqlite:///app.db", namespace="wallets", settings=settings)
    """

    fanout_poll_delay: Duration = default_duration("1s")
    """Longest pause of idle fan-out without a wake-up (jittered). 1 ms to 1 day."""

    fanout_batch_size: int = 1000
    """Events that a fan-out transaction turns into notifications, at most."""

    handling_enabled: bool = True
    """True if this process runs handlers. False for a deployment that only fans out."""

    handling_poll_delay: Duration = default_duration("1s")
    """Longest pause of the idle dispatcher without a wake-up (jittered). 1 ms to 1 day.

    A notification may be found so late in two cases: it becomes due by the time alone, or it was written without a
    wake-up. On MySQL, MariaDB and SQLite a process sends no wake-ups to the rest of the fleet."""

    handling_batch_size: int = 1000
    """Due notifications that the dispatcher reads at once, at most."""

    handling_max_backoff_cap: Duration = default_duration("5m")
    """Longest pause between two attempts of a failing handler. A ``RetryPolicy`` may have a different pause."""

    # A window shorter than the backoff cap is allowed: an attempt outside the window means EXPIRED.
    handling_retention_window: Duration = default_duration("7d")
    """Time after which an unfinished notification is EXPIRED, from its first possible run or from a retry by hand."""

    handler_timeout: Duration = default_duration("60s")
    """Time that a run of a handler may take before the run is cancelled and counted as a failure. The event loop may
    stand still for the longest such time of all handlers here before this process gives up the cluster locks."""

    concurrency: int = 100
    """Handlers that run at the same time on a shard in this process, at most; hooks besides."""

    max_hops: int = 32
    """Events in a chain of causes, at most. The limit stops two handlers whose events cause events for each handler."""

    max_crashes: int = 3
    """Starts of a row that end with the process instead of the run, before the row is DEAD. The count begins after a
    first crash. 1 is like 2: more rows run at the first counted start, so that start proves nothing about the row."""

    outcome_batch: int = 500
    """Outcomes of finished handlers that are written together, at most."""

    outcome_delay: Duration = default_duration("20ms")
    """Time that an outcome may wait for more outcomes, so that all are written together. Zero: no wait. After a crash
    the handlers of waiting outcomes run again."""

    shutdown_timeout: Duration = default_duration("25s")
    """Grace period of running handlers after ``running()`` is left, before the handlers are cancelled. Zero: none.
    Kubernetes kills a pod after 30 s: outcomes are written and locks given back in the seconds that are left."""

    pool_timeout: Duration = default_duration("30s")
    """Time that an action waits for a connection, or on SQLite for the turn to write, before
    :class:`~outboxio.errors.PoolExhausted` is raised."""

    lock_heartbeat: Duration = default_duration("5s")
    """Time between two proofs that a cluster lock is still held; the server drops a holder that is silent for 1.8
    times as long. 50 ms to 1 day."""

    lock_sessions: int = 8
    """Sessions for the locks of ``outbox.lock``, in each process and shard, at most. A lock that is held, or waits for
    a different process, uses a session; further tasks wait for a session. Of a given pool, at most a quarter."""

    balance: Balance = "partitioned"
    """``"partitioned"``: processes share the handlers that have several partitions, and the process that came first
    keeps the rest. ``"all"``: handlers with a single partition are spread over the processes too. An event then waits
    for a wake-up between processes: 0.5 ms longer on an idle PostgreSQL, 16 ms on an idle MySQL or MariaDB."""

    spread_after: Duration = default_duration("10s")
    """Time for which due notifications of a handler must have been waiting, for more than a second each, before the
    handler is shared among the processes that have it. Concerns handlers with ``partitions="auto"``."""

    subscription_ttl: Duration = default_duration("7d")
    """Time for which a handler that no process has any longer still gets notifications."""

    failing_alert_after: Duration = default_duration("1h")
    """Time for which a notification must have been failing before the overview and ``outboxio doctor`` report it."""

    connect_timeout: Duration = default_duration("10s")
    """Time in which a new connection to a server must be open."""

    statement_timeout: Duration = default_duration("60s")
    """Time in which a server must answer a statement of outboxio's own, BEGIN, COMMIT and the loops' statements among
    them, before its connection is given up."""

    action_statement_timeout: Duration = default_duration("0s")
    """Time that a statement of an action's own code may take before a TimeoutError. Zero: as long as the server is at
    work on the statement."""

    notify: bool = True
    """True if a commit wakes the rest of the fleet, where the database can (PostgreSQL). Polling goes on anyway."""

    record_empty_actions: bool = True
    """True if an action without events writes a sentinel event in ``events``."""

    validate_events: bool = True
    """True if the field values of an event are checked against the field types before the event is written."""

    purge_enabled: bool = True
    """True if ``running()`` removes rows that were kept long enough. ``outbox.admin.purge()`` does so in any case."""

    keep_finished: Duration = default_duration("7d")
    """Age at which finished notifications and fully settled events are removed."""

    keep_dead: Duration = default_duration("90d")
    """Age at which DEAD notifications are removed."""

    dedup_retention: Duration = default_duration("100d")
    """Time for which the inbox recognises an inbox message. As a rule longer than events are kept."""

    def __post_init__(self) -> None:
        for leaf in _LEAFS:
            msgspec.structs.force_setattr(self, leaf, _checked(leaf, getattr(self, leaf), key=leaf))

    @classmethod
    def load(
        cls,
        source: Mapping[str, object] | str | Path | None = None,
        environ: Mapping[str, str] | None = os.environ,
    ) -> Self:
        """Settings from a mapping or a TOML file, overridden by the environment.

        ``source``: a mapping, the path of a TOML file, or None. The settings are the table ``outboxio``, else the
        table ``tool.outboxio``, else the whole source. Names are in snake_case, kebab-case or camelCase, and may be
        nested at any word: ``handling_poll_delay``, ``handling-poll-delay``, ``handlingPollDelay`` and
        ``{"handling": {"poll-delay": ...}}`` are the same setting, which may be given only once.

        ``environ``: variables named ``OUTBOXIO_HANDLING_POLL_DELAY`` and so on; None reads none. ``OUTBOXIO_DATABASE``,
        ``OUTBOXIO_TARGET``, ``OUTBOXIO_NAMESPACE``, ``OUTBOXIO_WEBHOOK``, ``OUTBOXIO_TEST_*`` and the variables that
        Kubernetes sets for a service, such as ``OUTBOXIO_SERVICE_HOST``, are not settings. ``Outbox(...)`` without
        ``settings`` calls ``Settings.load()``.

        Durations are spelled as everywhere; text is converted (``"50"``; ``"true"``, ``"yes"``, ``"on"``, ``"1"`` and
        the opposites).

        Raises :class:`~outboxio.errors.SettingsError` for a name that is unknown or given twice and for a bad value,
        with the name as the source spells it, and for a file that cannot be read, with the path.

        Example::

            Settings.load("pyproject.toml")
            Settings.load({"handling": {"enabled": False}}, environ={"OUTBOXIO_CONCURRENCY": "50"})
        """
        return cls(**given_settings(source, environ))


_LEAFS: Final[Mapping[str, type[Any]]] = {field.name: field.type for field in msgspec.structs.fields(Settings)}


# --- bounds of values -----------------------------------------------------------------------------

_MICROSECOND: Final = timedelta(microseconds=1)
_DAY: Final = timedelta(days=1)
# "For ever" must still be subtractable from now: a much longer time leaves the calendars of Python and the servers.
_CENTURY: Final = timedelta(days=36_500)

# The largest value of the smallest integer type of all databases: the numbers become limits of statements.
_LARGEST_NUMBER: Final = 2**31 - 1

_RANGES: Final[Mapping[str, tuple[timedelta, timedelta]]] = {
    # An idle loop must not become a busy loop. Polling finds the rows of a lost wake-up.
    "fanout_poll_delay": (timedelta(milliseconds=1), _DAY),
    "handling_poll_delay": (timedelta(milliseconds=1), _DAY),
    # The server drops a holder that is silent for nearly two heartbeats. Any less, and a pause of the garbage
    # collector or the network costs the lock; any more, and a frozen holder keeps the lock for days.
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
"""In place of the value of an unknown variable or key, which may be a secret, such as OUTBOXIO_DATABASE_URL."""
_PREFIX: Final = "OUTBOXIO_"
_OF_OTHERS: Final = {
    "OUTBOXIO_DATABASE",
    "OUTBOXIO_TARGET",
    "OUTBOXIO_NAMESPACE",
    "OUTBOXIO_WEBHOOK",
}  # of examples, and of the command line
_OF_KUBERNETES: Final = re.compile(
    r"OUTBOXIO_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""The variables of a service named ``outboxio`` or ``outboxio-...``, which every pod of its namespace gets."""
_OF_COMMAND_LINE: Final = ("target", "namespace")
"""Keys in the table ``tool.outboxio`` of ``pyproject.toml`` that say which outbox the command line works on."""


def given_settings(
    source: Mapping[str, object] | str | Path | None, environ: Mapping[str, str] | None
) -> dict[str, Any]:
    """The settings that a source and the environment give, without the defaults. See :meth:`Settings.load`."""
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
    written: dict[str, str] = {}
    for key, value in _flattened(table):
        leaf = _snake_case(key)
        if leaf not in _LEAFS:
            raise SettingsError(key, _NOT_SHOWN, _expected_instead_of(leaf))
        if leaf in written:
            raise SettingsError(key, value, f"one spelling of {leaf}, which is also given as {written[leaf]}")
        written[leaf] = key
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
    if not variable.startswith(_PREFIX) or variable in _OF_OTHERS or variable.startswith(f"{_PREFIX}TEST_"):
        return False
    return _OF_KUBERNETES.fullmatch(variable) is None


def _variable(leaf: str) -> str:
    return f"{_PREFIX}{leaf.upper()}"


def _flattened(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """``{"handling": {"enabled": x}}`` as ``("handling.enabled", x)``: the key as the source spells it."""
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


# --- meanings of names and texts -----------------------------------------------------------------

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
    words = re.sub(r"(?<=[a-z0-9])[A-Z]", lambda capital: f"_{capital[0].lower()}", key)
    return words.replace("-", "_").replace(".", "_")


def _read(leaf: str, value: object) -> object:
    """The value that a text means. A text without a meaning is returned unchanged, and the check refuses the text."""
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
