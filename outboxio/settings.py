"""Every number and switch that a user may set, in one frozen struct, and the ways to read it.

The struct's fields are the only list of settings: spellings, environment variables, conversions and checks all derive
from their names and types. A new setting is one field, and one line in ``_RANGES`` if its bounds are unusual.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeGuard

import msgspec

from outboxio.duration import Duration, default_duration, format_duration, parse_duration
from outboxio.errors import SettingsError


class _SettingsMeta(msgspec.StructMeta):
    # Hidden from type checkers, so that they go on checking calls against the fields.
    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **leafs: Any) -> Any:
            for name, value in leafs.items():
                if name not in self.__struct_fields__:
                    raise SettingsError(name, value, _expected_instead_of(_snake_case(name)))
            return super().__call__(*args, **leafs)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_SettingsMeta):
    """How an outbox behaves. Every setting has a default that suits production.

    A duration is read as a ``timedelta``, and may be given as one, as seconds (``0.5``), as ``"20ms"``, ``"1h30m"``,
    or as ISO-8601 (``"PT1S"``). Durations are longer than zero unless said otherwise, and at most 100 years; numbers
    are 1 or more. A setting that is unknown or out of bounds raises :class:`~outboxio.errors.SettingsError`, which
    names it, its value and what is expected.

    Example::

        settings = Settings(fanout_poll_delay="250ms", concurrency=20)
        settings.fanout_poll_delay == timedelta(milliseconds=250)

        settings = Settings.load("outboxio.toml")     # and the environment: OUTBOXIO_CONCURRENCY=50
        outbox = Outbox("sqlite:///app.db", namespace="wallets", settings=settings)
    """

    fanout_poll_delay: Duration = default_duration("1s")
    """Longest wait of the idle fan-out for a wake-up before it looks by itself (jittered). 1 ms to 1 day."""

    fanout_batch_size: int = 1000
    """Events that one fan-out transaction turns into notifications, at most."""

    handling_enabled: bool = True
    """Whether this process runs handlers. False for a deployment that only fans out."""

    handling_poll_delay: Duration = default_duration("1s")
    """Longest wait of the idle dispatcher for a wake-up before it looks by itself (jittered). 1 ms to 1 day."""

    handling_batch_size: int = 1000
    """Due notifications that one look at the database takes, at most."""

    handling_max_backoff_cap: Duration = default_duration("5m")
    """Longest pause between two attempts of a failing handler; a ``RetryPolicy`` may give its own."""

    # A window shorter than the backoff cap is allowed: an attempt that would fall outside it has a meaning (EXPIRED).
    handling_retention_window: Duration = default_duration("7d")
    """Time after which an unfinished notification is EXPIRED, from when it could first run or was retried by hand."""

    handler_timeout: Duration = default_duration("60s")
    """Time that one run of a handler may take before it is cancelled and counted as a failure."""

    concurrency: int = 100
    """Handlers that run at the same time on one shard in this process, at most."""

    max_hops: int = 32
    """Events that may cause each other in one chain, at most: what stops two handlers that feed each other."""

    max_crashes: int = 3
    """Starts that a row may have which end with its process, and not with the run, before it is DEAD. They are counted
    after a first crash, and 1 is like 2: the first start that is counted has company, and proves nothing."""

    outcome_batch: int = 500
    """Outcomes of finished handlers that are written together, at most."""

    outcome_delay: Duration = default_duration("20ms")
    """Time that an outcome may wait for others to be written with it. Zero: none. A crash runs the waiting again."""

    shutdown_timeout: Duration = default_duration("30s")
    """Time that running handlers get to finish when ``running()`` is left, before they are cancelled. Zero: none."""

    lock_heartbeat: Duration = default_duration("5s")
    """Time between two proofs that a cluster lock is still held; the server drops a holder that is silent for 1.8
    times as long. 50 ms to 1 day."""

    subscription_ttl: Duration = default_duration("7d")
    """Time for which a handler that no process has any more still gets its notifications."""

    notify: bool = True
    """Whether a commit wakes other processes, where the database can (PostgreSQL). Polling goes on in any case."""

    record_empty_actions: bool = True
    """Whether an action that emits nothing leaves a row (a sentinel) in ``events``."""

    purge_enabled: bool = True
    """Whether ``running()`` removes rows that were kept long enough. ``outbox.admin.purge()`` does so when asked."""

    keep_finished: Duration = default_duration("7d")
    """Age at which finished notifications and fully settled events are removed."""

    keep_dead: Duration = default_duration("90d")
    """Age at which DEAD notifications are removed."""

    dedup_retention: Duration = default_duration("100d")
    """Time for which the inbox recognises an event that it received before. Longer than events are kept, as a rule."""

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

        ``source``: a mapping, the path of a TOML file, or None. The settings are its table ``outboxio``, else its
        table ``tool.outboxio``, else everything in it. Names are in snake_case, kebab-case or camelCase, and may be
        nested at any word: ``handling_poll_delay``, ``handling-poll-delay``, ``handlingPollDelay`` and
        ``{"handling": {"poll-delay": ...}}`` are one setting, which may be given only once.

        ``environ``: variables named ``OUTBOXIO_HANDLING_POLL_DELAY`` and so on; None reads none. ``OUTBOXIO_DATABASE``
        and ``OUTBOXIO_TEST_*`` are other people's.

        Durations are spelled as everywhere; text is converted (``"50"``; ``"true"``, ``"yes"``, ``"on"``, ``"1"`` and
        their opposites).

        Raises :class:`~outboxio.errors.SettingsError` for a name that is unknown or given twice and for a bad value,
        naming it as it is written there, and for a file that cannot be read, naming its path.

        Example::

            Settings.load("pyproject.toml")
            Settings.load({"handling": {"enabled": False}}, environ={"OUTBOXIO_CONCURRENCY": "50"})
        """
        from_source = {} if source is None else _from_table(_table_of(source))
        return cls(**from_source | _from_environ(environ or {}))


_LEAFS: Final[Mapping[str, type[Any]]] = {field.name: field.type for field in msgspec.structs.fields(Settings)}


# --- is this value allowed? ----------------------------------------------------------------------

_MICROSECOND: Final = timedelta(microseconds=1)
_DAY: Final = timedelta(days=1)
# "For ever" must still be subtractable from now: a much longer time leaves the calendars of Python and the servers.
_CENTURY: Final = timedelta(days=36_500)

_RANGES: Final[Mapping[str, tuple[timedelta, timedelta]]] = {
    # An idle loop must not become a busy one, and polling is what finds the work whose wake-up was lost.
    "fanout_poll_delay": (timedelta(milliseconds=1), _DAY),
    "handling_poll_delay": (timedelta(milliseconds=1), _DAY),
    # The server drops a holder that is silent for nearly two heartbeats. Any less, and one pause of the garbage
    # collector or the network costs the lock; any more, and a frozen holder keeps it for days.
    "lock_heartbeat": (timedelta(milliseconds=50), _DAY),
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
    return value


def _checked_switch(leaf: str, value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(key, value, "true or false")
    return value


_CHECKS: Final[Mapping[type[Any], Callable[[str, object, str], object]]] = {
    timedelta: _checked_duration,
    int: _checked_number,
    bool: _checked_switch,
}


# --- where do values come from? ------------------------------------------------------------------

_PREFIX: Final = "OUTBOXIO_"


def _table_of(source: Mapping[str, object] | str | Path) -> Mapping[str, object]:
    everything = source if isinstance(source, Mapping) else _toml(Path(source))
    tool = everything.get("tool")
    if "outboxio" in everything:
        return _table("outboxio", everything["outboxio"])
    if _is_table(tool) and "outboxio" in tool:
        return _table("tool.outboxio", tool["outboxio"])
    return everything


def _toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingsError("source", str(path), f"a file that can be read ({error.strerror})") from error
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise SettingsError("source", str(path), f"a TOML file ({error})") from error


def _table(key: str, value: object) -> Mapping[str, object]:
    if not _is_table(value):
        raise SettingsError(key, value, "a table of settings")
    return value


def _from_table(table: Mapping[str, object]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, value in _flattened(table):
        leaf = _snake_case(key)
        if leaf not in _LEAFS:
            raise SettingsError(key, value, _expected_instead_of(leaf))
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
            # A variable that we do not know may well be a secret (OUTBOXIO_DATABASE_URL): it stays out of the logs.
            raise SettingsError(key, "<not shown>", _expected_instead_of(leaf, spell=_variable))
        values[leaf] = _checked(leaf, _read(leaf, environ[key]), key=key)
    return values


def _is_ours(variable: str) -> bool:
    foreign = variable == f"{_PREFIX}DATABASE" or variable.startswith(f"{_PREFIX}TEST_")
    return variable.startswith(_PREFIX) and not foreign


def _variable(leaf: str) -> str:
    return f"{_PREFIX}{leaf.upper()}"


def _flattened(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """``{"handling": {"enabled": x}}`` as ``("handling.enabled", x)``: the key as it is written."""
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


# --- what do names and texts mean? ---------------------------------------------------------------

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
    """The value that a text means; a text that means none is left for the check to refuse, in its own words."""
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


def _expected_instead_of(leaf: str, spell: Callable[[str], str] = str) -> str:
    close = difflib.get_close_matches(leaf, _LEAFS, n=1)
    if close:
        return f"a known setting; did you mean {spell(close[0])}?"
    return f"a known setting: {', '.join(map(spell, _LEAFS))}"
