"""Converts URLs of MySQL and MariaDB to arguments of the driver's ``connect``."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from outboxio.errors import ConfigurationError

if TYPE_CHECKING:
    from outboxio.storage.engines.user_engine import UserEngine

DEFAULT_PORT = 3306
OPTIONS = ("unix_socket", "ssl_mode", "ssl_ca", "ssl_cert", "ssl_key", "connect_timeout")
# Options of asyncmy with the same name in aiomysql, except for database.
_ENGINE_OPTIONS = (
    "user", "password", "host", "port", "db", "database", "unix_socket", "connect_timeout", "init_command",
    "program_name", "server_public_key",
)  # fmt: skip
# Options that change statements and results. Loop connections have their own settings.
_OPTIONS_OF_RESULTS = (
    "charset", "use_unicode", "conv", "client_flag", "cursor_cls", "autocommit", "sql_mode", "echo", "query_callback",
    "stmt_cache_size", "local_infile", "max_allowed_packet", "read_timeout", "binary_prefix",
)  # fmt: skip
SSL_MODES = ("DISABLED", "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY")


def connect_arguments(shard: str, url: str) -> dict[str, Any]:
    """Return the arguments of the driver's ``connect``. Raises :class:`ConfigurationError` for unknown options.

    ``mysql://user:password@host:3306/database?ssl_mode=VERIFY_IDENTITY&ssl_ca=/etc/ssl/ca.pem``, or
    ``mysql://user@/database?unix_socket=/run/mysqld/mysqld.sock``.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in OPTIONS:
            # A name that is not an identifier may be a part of a password.
            shown = repr(name) if not name or name.isidentifier() else "whose name is not an identifier"
            raise ConfigurationError(
                f"shard {shard!r} has a URL with the unknown option {shown}; expected {', '.join(OPTIONS)}"
            )
    if "," in parts.netloc.rpartition("@")[2]:
        raise ConfigurationError(f"shard {shard!r} has a URL with several hosts; the driver supports only one")
    arguments: dict[str, Any] = {
        "user": unquote(parts.username or "") or None,
        "password": unquote(parts.password or ""),
        "db": unquote(parts.path.removeprefix("/")) or None,
    }
    if "unix_socket" in options:
        arguments["unix_socket"] = options["unix_socket"]
    else:
        arguments |= {"host": parts.hostname or "127.0.0.1", "port": _port(shard, url)}
    if "connect_timeout" in options:
        arguments["connect_timeout"] = _seconds(shard, options["connect_timeout"])
    context = _ssl_context(shard, options)
    return arguments if context is None else {**arguments, "ssl": context}


def arguments_of_engine(engine: UserEngine, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of aiomysql's ``connect`` for the options of an engine that uses asyncmy.

    Raises :class:`ConfigurationError` for an option that aiomysql does not have, or interprets differently.
    """
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if name == "ssl" and value:
            arguments[name] = value if isinstance(value, ssl.SSLContext) else _context_of_engine(engine, value)
        elif name in _ENGINE_OPTIONS and value:
            arguments["db" if name == "database" else name] = value
        elif name not in (*_OPTIONS_OF_RESULTS, *_ENGINE_OPTIONS, "ssl") and value is not None:
            raise engine.refusal(f"the option {name}")
    return arguments


def url_of(dialect: str, arguments: Mapping[str, Any]) -> str:
    """Return a URL without user and password, for errors and logs."""
    host, socket = arguments.get("host", "localhost"), arguments.get("unix_socket")
    address = "" if socket else f"{host}:{arguments.get('port', DEFAULT_PORT)}"
    return f"{dialect}://{address}/{arguments.get('db', '')}" + (f"?unix_socket={socket}" if socket else "")


def _context_of_engine(engine: UserEngine, options: Any) -> ssl.SSLContext | None:
    """Create the TLS context that asyncmy would create for ``ssl=True``, or for a dict of options."""
    remaining: dict[str, Any] = {} if options is True else dict(options)
    checks_host = remaining.pop("check_hostname", True)
    mode = "REQUIRED" if "ca" not in remaining else "VERIFY_IDENTITY" if checks_host else "VERIFY_CA"
    if unknown := remaining.keys() - {"ca", "cert", "key"}:
        raise engine.refusal(f"the TLS options {', '.join(sorted(unknown))} (use an ssl.SSLContext instead)")
    return _ssl_context(engine.shard, {"ssl_mode": mode, **{f"ssl_{name}": text for name, text in remaining.items()}})


def dialect_of(url: str) -> str:
    """``mysql`` or ``mariadb``."""
    return urlsplit(url).scheme.partition("+")[0]


def where(url: str | None) -> str:
    """Return the parts of a URL that may be shown, without user and password. ``None`` is the user-supplied pool."""
    if url is None:
        return "the user-supplied pool"
    parts = urlsplit(url)
    socket = dict(parse_qsl(parts.query)).get("unix_socket")
    database = parts.path.removeprefix("/")
    if socket:
        return f"the socket {socket}" + (f", database {database}" if database else "")
    return f"{parts.netloc.rpartition('@')[2] or '127.0.0.1'}{parts.path}"


def _port(shard: str, url: str) -> int:
    try:
        return urlsplit(url).port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigurationError(f"shard {shard!r} has a URL with an invalid port: {error}") from error


def _seconds(shard: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(
            f"shard {shard!r} has a URL with connect_timeout={text!r}; expected seconds, such as 10"
        )
    return seconds


def _ssl_context(shard: str, options: Mapping[str, str]) -> ssl.SSLContext | None:
    """Create the TLS context. The options have the same meaning as in MySQL's clients: ``ssl_ca`` implies VERIFY_CA."""
    default = "VERIFY_CA" if "ssl_ca" in options else "REQUIRED" if "ssl_cert" in options else "DISABLED"
    mode = options.get("ssl_mode", default).upper()
    if mode not in SSL_MODES:
        raise ConfigurationError(
            f"shard {shard!r} has a URL with ssl_mode={options['ssl_mode']!r}; expected one of {', '.join(SSL_MODES)}"
        )
    if mode == "DISABLED":
        if unused := [name for name in ("ssl_ca", "ssl_cert", "ssl_key") if name in options]:
            raise ConfigurationError(f"shard {shard!r} has a URL with ssl_mode=DISABLED and {', '.join(unused)}")
        return None
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca"))
        context.check_hostname = mode == "VERIFY_IDENTITY"
        if mode == "REQUIRED":
            context.verify_mode = ssl.CERT_NONE
        if "ssl_cert" in options:
            context.load_cert_chain(options["ssl_cert"], options.get("ssl_key"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"shard {shard!r} has a URL with certificates that cannot be read: {error}") from error
    return context
