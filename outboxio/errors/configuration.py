"""The base class of all errors, and configuration errors."""

from __future__ import annotations

from collections.abc import Iterable

from outboxio.support.text import instead_of, spelled, without_passwords


class OutboxError(Exception):
    """The base class of all outboxio errors, except those that handlers raise, such as ``RetryAfter``."""


class ConfigurationError(OutboxError):
    """The configuration or an argument is invalid. No loop was started, and no row was written."""


class SettingsError(ConfigurationError):
    """A setting is unknown or has an invalid value."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        self.key = key
        self.value = value
        self.expected = expected
        super().__init__(f"setting {key} = {without_passwords(spelled(value))}: expected {expected}")


class RegistrationError(ConfigurationError):
    """A handler or an event class cannot be registered."""


class UnknownHandler(ConfigurationError):
    """An operation names a handler that is not registered, subscribed or paused, and has no notifications."""

    def __init__(self, name: str, namespace: str, known: Iterable[str]) -> None:
        self.name = name
        self.namespace = namespace
        super().__init__(f"there is no handler {name!r} in namespace {namespace!r}: {instead_of(name, known)}")


class UnknownEventType(ConfigurationError):
    """An operation names an event type that is not registered in this process, and that no handler subscribes to."""

    def __init__(self, name: str, namespace: str, known: Iterable[str]) -> None:
        self.name = name
        self.namespace = namespace
        super().__init__(f"there is no event type {name!r} in namespace {namespace!r}: {instead_of(name, known)}")


class PoolTooSmall(ConfigurationError):
    """The user-supplied pool is too small for the cluster lock, the loops and one action."""

    def __init__(self, shard: str, size: int, needed: int, option: str) -> None:
        self.shard = shard
        self.size = size
        self.needed = needed
        super().__init__(
            f"the pool of shard {shard!r} holds at most {size} connections, but the cluster lock, the loops and "
            f"one action need {needed}: set {option}={needed} or more, or pass a URL instead of a pool"
        )


class SameDatabase(ConfigurationError):
    """Two shards use the same eventlog, so every event would be handled twice."""

    def __init__(self, first: str, second: str) -> None:
        self.first = first
        self.second = second
        super().__init__(f"shards {first!r} and {second!r} use the same eventlog; every shard needs its own database")


class WrongEventLoop(ConfigurationError):
    """An outbox, or the pool of a shard, was used in a second event loop. No row was written.

    ``owner`` describes the event loop that the outbox belongs to, ``here`` the one that used it.
    """

    def __init__(self, subject: str, owner: str, here: str) -> None:
        self.subject = subject
        self.owner = owner
        self.here = here
        super().__init__(
            f"{subject} belongs to {owner}, but was used {here}. It can be used in one event loop at a time: "
            "create one Outbox per event loop, or `await outbox.close()` in the first loop before using it in another"
        )

    @classmethod
    def of_pool(cls, shard: str, *, is_closed: bool) -> WrongEventLoop:
        """Return the error for a pool that was created in another event loop."""
        state = "is closed" if is_closed else "is not the current one"
        return cls(f"the pool of shard {shard!r}", f"the event loop that created it, which {state}", "in this one")


class WrongProcess(ConfigurationError):
    """An outbox that the parent process had opened was used in a forked child process. No row was written.

    ``opened_in`` is the id of the process that opened the outbox, ``process`` the id of the child.
    """

    def __init__(self, subject: str, opened_in: int, process: int) -> None:
        self.subject = subject
        self.opened_in = opened_in
        self.process = process
        super().__init__(
            f"{subject} was opened in process {opened_in} and used in process {process}, a forked child that must not "
            "share the connections of its parent: create the outbox, or use it for the first time, after the fork "
            "(in the lifespan of a web application, post_fork of gunicorn, worker_process_init of Celery), or `await "
            "outbox.close()` before the fork"
        )


class WrongDatabase(ConfigurationError):
    """The connection passed to ``record`` belongs to another database than the shard. No row was written.

    ``actual`` describes the database of the connection, ``expected`` the database of the shard.
    """

    def __init__(self, shard: str, actual: str, expected: str) -> None:
        self.shard = shard
        self.actual = actual
        self.expected = expected
        super().__init__(
            f"the connection is to {actual}, but shard {shard!r} is {expected}: no process would fan out the events "
            "there. Pass a connection to the shard's database, or the name of the shard that the connection belongs to"
        )


class PooledConnection(ConfigurationError):
    """The connection for cluster locks and LISTEN goes through a transaction-pooling proxy."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        super().__init__(
            f"shard {shard!r} is reached through a transaction-pooling proxy: two connections share one server "
            "session, which breaks session locks and LISTEN; configure the shard as "
            "Shard(url, direct_url=...) with a direct_url that bypasses the proxy"
        )
