"""URLs of MySQL and MariaDB: their parts, and the errors for invalid URLs."""

from __future__ import annotations

import re
import ssl
import sys
from pathlib import Path

import pytest

from outboxio import ConfigurationError, Outbox
from outboxio.storage.mysql.url import OPTIONS, SSL_MODES, connect_arguments, where

AUTHORITY = ssl.get_default_verify_paths()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mysql://host/app", {"host": "host", "port": 3306, "user": None, "password": "", "db": "app"}),
        ("mysql://host:3307/app", {"host": "host", "port": 3307, "user": None, "password": "", "db": "app"}),
        ("mysql://[::1]:3307/app", {"host": "::1", "port": 3307, "user": None, "password": "", "db": "app"}),
        ("mysql:///app", {"host": "127.0.0.1", "port": 3306, "user": None, "password": "", "db": "app"}),
        ("mysql://me@host", {"host": "host", "port": 3306, "user": "me", "password": "", "db": None}),
        (
            "mariadb://m%40e:p%3As%2Fs%25@host/a%20pp",
            {"host": "host", "port": 3306, "user": "m@e", "password": "p:s/s%", "db": "a pp"},
        ),
        (
            "mysql://me@/app?unix_socket=%2Frun%2Fa%20b.sock",
            {"user": "me", "password": "", "db": "app", "unix_socket": "/run/a b.sock"},
        ),
        (
            "mysql://me@host/app?unix_socket=/run/s",
            {"user": "me", "password": "", "db": "app", "unix_socket": "/run/s"},
        ),
        (
            "mysql://host/app?connect_timeout=2.5",
            {"host": "host", "port": 3306, "user": None, "password": "", "db": "app", "connect_timeout": 2.5},
        ),
    ],
)
def test_a_url_has_address_user_and_database(url: str, expected: dict[str, object]) -> None:
    assert connect_arguments("main", url) == expected


@pytest.mark.parametrize(
    ("url", "dialect"),
    [
        ("mysql://host/app", "mysql"),
        ("mysql+aiomysql://host/app", "mysql"),
        ("mysql+asyncmy://host/app", "mysql"),
        ("mariadb+aiomysql://host/app", "mariadb"),
        ("mariadb+asyncmy://host/app", "mariadb"),
    ],
)
async def test_a_url_may_name_its_driver(url: str, dialect: str) -> None:
    async with Outbox(url, namespace="app") as outbox:
        assert outbox.executor.shard(None).database.dialect == dialect


@pytest.mark.parametrize("scheme", ["mysql+pymysql", "mariadb+mysqldb"])
def test_an_unknown_driver_is_rejected_with_the_supported_urls(scheme: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"the scheme {scheme!r}")) as caught:
        Outbox(f"{scheme}://host/app", namespace="app")
    assert "mysql://host/database, mariadb://host/database" in str(caught.value)


def test_a_missing_driver_is_reported_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("database", "driver"):
        monkeypatch.delitem(sys.modules, f"outboxio.storage.mysql.{name}", raising=False)
        monkeypatch.delattr(f"outboxio.storage.mysql.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "aiomysql", None)
    with pytest.raises(ConfigurationError, match=r"the driver aiomysql: pip install 'outboxio\[mysql\]'"):
        Outbox("mysql://host/app", namespace="app")


@pytest.mark.parametrize("option", ["sslmode", "charset", "autocommit", "SSL_MODE", ""])
def test_an_unknown_option_is_rejected_with_the_known_ones(option: str) -> None:
    with pytest.raises(
        ConfigurationError, match=re.escape(f"shard 'main' has a URL with the unknown option {option!r}")
    ) as e:
        connect_arguments("main", f"mysql://host/app?{option}=1")
    for known in OPTIONS:
        assert known in str(e.value)


def test_several_hosts_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="several hosts"):
        connect_arguments("main", "mysql://first,second/app")


@pytest.mark.parametrize("seconds", ["", "soon", "0", "-1", "inf", "nan"])
def test_an_invalid_timeout_is_rejected(seconds: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"connect_timeout={seconds!r}; expected seconds")):
        connect_arguments("main", f"mysql://host/app?connect_timeout={seconds}")


@pytest.mark.parametrize("port", ["65536", "-1", "abc"])
def test_an_invalid_port_is_rejected(port: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid port"):
        connect_arguments("main", f"mysql://host:{port}/app")


# --- TLS -----------------------------------------------------------------------------------------


def context_of(options: str) -> ssl.SSLContext | None:
    context = connect_arguments("main", f"mysql://host/app?{options}").get("ssl")
    assert context is None or isinstance(context, ssl.SSLContext)
    return context


@pytest.mark.parametrize("options", ["", "ssl_mode=DISABLED", "ssl_mode=disabled"])
def test_without_a_mode_there_is_no_tls(options: str) -> None:
    assert context_of(options) is None


@pytest.mark.parametrize(
    ("mode", "verifies", "checks_name"),
    [
        ("REQUIRED", ssl.CERT_NONE, False),
        ("required", ssl.CERT_NONE, False),
        ("VERIFY_CA", ssl.CERT_REQUIRED, False),
        ("VERIFY_IDENTITY", ssl.CERT_REQUIRED, True),
    ],
)
def test_a_mode_has_the_same_meaning_as_in_mysql_clients(
    mode: str, verifies: ssl.VerifyMode, checks_name: bool
) -> None:
    context = context_of(f"ssl_mode={mode}")
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (verifies, checks_name)


@pytest.mark.skipif(AUTHORITY.cafile is None, reason="this machine has no file of certificate authorities")
def test_a_certificate_authority_implies_verification() -> None:
    context = context_of(f"ssl_ca={AUTHORITY.cafile}")
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, False)


@pytest.mark.parametrize("mode", ["", "PREFERRED", "yes"])
def test_an_unknown_mode_is_rejected_with_the_known_ones(mode: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"ssl_mode={mode!r}")) as caught:
        context_of(f"ssl_mode={mode}")
    assert all(known in str(caught.value) for known in SSL_MODES)


@pytest.mark.parametrize("option", ["ssl_ca", "ssl_cert", "ssl_key"])
def test_certificates_without_tls_are_rejected(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"ssl_mode=DISABLED and {option}"):
        context_of(f"ssl_mode=DISABLED&{option}=/a.pem")


@pytest.mark.parametrize("option", ["ssl_ca", "ssl_cert"])
def test_unreadable_certificates_are_rejected(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="certificates that cannot be read"):
        context_of(f"{option}={tmp_path / 'missing.pem'}")
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigurationError, match="certificates that cannot be read"):
        context_of(f"{option}={tmp_path / 'empty.pem'}")


def test_a_key_without_its_certificate_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        context_of(f"ssl_key={tmp_path / 'key.pem'}")


# --- addresses in errors and logs ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mysql://me:secret@host:3307/app?ssl_mode=REQUIRED", "host:3307/app"),
        ("mysql://me:s@cret@host/app", "host/app"),
        ("mysql:///app", "127.0.0.1/app"),
        ("mysql://me:secret@/app?unix_socket=/run/s.sock", "the socket /run/s.sock, database app"),
    ],
)
def test_the_shown_address_has_neither_user_nor_password(url: str, shown: str) -> None:
    assert where(url) == shown


@pytest.mark.parametrize("url", ["host:x/app", "host/app?ssl=1", "first,second/app", "host/app?ssl_mode=no"])
def test_no_error_shows_the_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connect_arguments("main", f"mysql://me:secret@{url}")
    assert "secret" not in str(caught.value)
