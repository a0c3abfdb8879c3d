"""The root of all errors, and errors in the set-up of an outbox."""

from __future__ import annotations

from collections.abc import Iterable

from outboxio.support.text import instead_of, spelled, without_passwords


class OutboxError(Exception):
    """The root of all errors of outboxio, except the errors that a handler raises, such as ``RetryAfter``."""


class ConfigurationError(OutboxError):
    """The set-up is wrong. No loop was started, and no row was written."""


class SettingsError(ConfigurationError):
    """A setting is unknown, or has a wrong value."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        self.key = key
        self.value = value
        self.expected = expected
        super().__init__(f"setting {key} = {without_passwords(spelled(value))}: expected {expected}")


class RegistrationError(ConfigurationError):
    """A handler or an event class cannot be registered."""


class UnknownHandler(ConfigurationError):
    """An operator named a handler that is not registered, subscribed or paused, and has no notifications."""

    def __init__(self, name: str, namespace: str, known: Iterable[str]) -> None:
        self.name = name
        self.namespace = namespace
        super().__init__(f"there is no handler {name!r} in namespace {namespace!r}: {instead_of(name, known)}")


class UnknownEventType(ConfigurationError):
    """An operator named an event type that is not registered in this process, and that no handler wants."""

    def __init__(self, name: str, namespace: str, known: Iterable[str]) -> None:
        self.name = name
        self.namespace = namespace
        super().__init__(f"there is no event type {name!r} in namespace {namespace!r}: {instead_of(name, known)}")


class PoolTooSmall(ConfigurationError):
    """The pool that the application gave is too small for the cluster lock, the loops and an action."""

    def __init__(self, shard: str, size: int, needed: int, option: str) -> None:
        self.shard = shard
        self.size = size
        self.needed = needed
        super().__init__(
            f"the pool of shard {shard!r} holds at most {size} connections, but the cluster lock, the loops and "
            f"one action need {needed}: give it {option}={needed} or more, or give a URL instead of a pool"
        )


class SameDatabase(ConfigurationError):
    """Two shards reach the same eventlog, so both would handle each event."""

    def __init__(self, first: str, second: str) -> None:
        self.first = first
        self.second = second
        super().__init__(
            f"shards {first!r} and {second!r} reach the same eventlog; every shard needs a database of its own"
        )


class WrongEventLoop(ConfigurationError):
    """An outbox, or the pool of a shard, was used in a second event loop. No row was written.

    ``owner`` describes the event loop of the outbox, ``here`` the place of the use.
    """

    def __init__(self, subject: str, owner: str, here: str) -> None:
        self.subject = subject
        self.owner = owner
        self.here = here
        super().__init__(
            f"{subject} belongs to {owner}, and was used {here}. It works in one event loop at a time: make one Outbox "
            "for each event loop, or `await outbox.close()` in the first loop before another one uses the outbox"
        )

    @classmethod
    def of_pool(cls, shard: str, *, is_closed: bool) -> WrongEventLoop:
        """The error for the pool of a shard that was made in a former event loop."""
        state = "is closed" if is_closed else "is another one than here"
        return cls(f"the pool of shard {shard!r}", f"the event loop that it was made in, which {state}", "in this one")


class WrongProcess(ConfigurationError):
    """An outbox that the parent process had opened was used in a forked child. No row was written.

    ``opened_in`` and ``process`` are process ids: of the process that opened the outbox, and of the child.
    """

    def __init__(self, subject: str, opened_in: int, process: int) -> None:
        self.subject = subject
        self.opened_in = opened_in
        self.process = process
        super().__init__(
            f"{subject} was opened in process {opened_in}, and was used in process {process}, a forked copy that must "
            "not use the connections of its parent: make the outbox, or use it for the first time, after the fork (in "
            "the lifespan of the application, post_fork of gunicorn, worker_process_init of Celery), or `await "
            "outbox.close()` before the fork"
        )


class OtherDatabase(ConfigurationError):
    """The connection that was given to ``record`` is not of the shard's database. No row was written."""

    def __init__(self, shard: str, given: str, own: str) -> None:
        self.shard = shard
        self.given = given
        self.own = own
        super().__init__(
            f"the connection is of {given}, but shard {shard!r} is {own}: no process would fan out the events there. "
            "Give a connection to the shard's own database, or name the shard that the connection belongs to"
        )


class PooledConnection(ConfigurationError):
    """The connection for cluster locks and LISTEN goes through a proxy that shares server sessions."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        super().__init__(
            f"shard {shard!r} is reached through a transaction-pooling proxy: two connections share one server "
            "session, which breaks session locks and LISTEN; give the shard as "
            "Shard(url, direct_url=...) with a direct_url that reaches the server itself"
        )
