"""TLS as described in docs/operate/security.md; see ``test_mysql_storage.py`` for more about TLS on MySQL."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from outboxio import DatabaseUnavailable, Outbox
from tests.kit.app import Emit, Look, eventually
from tests.kit.inside import database_of
from tests.kit.programs import programs

Certificates = dict[str, Path]


def certificate(directory: Path, name: str) -> Path:
    """A self-signed certificate for this host name; its key is beside it."""
    made = directory / f"{name}.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
         "-addext", f"subjectAltName={'IP' if name[0].isdigit() else 'DNS'}:{name}",
         "-keyout", made.with_suffix(".key"), "-out", made],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


def give(certificate: Path, data: Path) -> None:
    """Put a certificate and its key where the server finds them, readable only by the server."""
    owner = data.stat()
    for file in (certificate, certificate.with_suffix(".key")):
        copy = data / f"test{file.suffix}"
        shutil.copy(file, copy)
        copy.chmod(0o600)
        os.chown(copy, owner.st_uid, owner.st_gid)


@pytest.fixture
async def tls(postgres_url: str, tmp_path: Path) -> AsyncIterator[Certificates]:
    """The test's server uses TLS, with a certificate for 127.0.0.1."""
    look = Look(postgres_url)
    data = Path(await look.value("SHOW data_directory"))
    if not os.access(data, os.W_OK):
        pytest.skip("the tests cannot configure this server")
    programs.need("openssl")
    ours, another = certificate(tmp_path, "127.0.0.1"), certificate(tmp_path, "elsewhere.example")

    async def speaks() -> bool:
        try:
            connection = await asyncpg.connect(with_mode(postgres_url, "require"))
        except (OSError, asyncpg.PostgresError):
            return False
        await connection.close()
        return True

    async def silent() -> bool:
        return not await speaks()

    if await speaks():
        pytest.skip("the server has a certificate of its own already")
    give(ours, data)
    settings = {"ssl_cert_file": "test.crt", "ssl_key_file": "test.key", "ssl": "on"}
    try:
        for name, value in settings.items():
            await look.fetch(f"ALTER SYSTEM SET {name} = '{value}'")
        await look.fetch("SELECT pg_reload_conf()")
        await eventually(speaks)
        yield {"ours": ours, "another": another}
    finally:
        for name in settings:
            await look.fetch(f"ALTER SYSTEM RESET {name}")
        await look.fetch("SELECT pg_reload_conf()")
        await eventually(silent)


def with_mode(url: str, mode: str, authority: Path | None = None, host: str | None = None) -> str:
    parts = urlsplit(url)
    query = f"sslmode={mode}" + ("" if authority is None else f"&sslrootcert={authority}")
    place = parts.netloc if host is None else parts.netloc.replace(parts.hostname or "", host)
    return parts._replace(netloc=place, query=query).geturl()


async def ciphers(outbox: Outbox) -> set[str | None]:
    """The ciphers of the connections of actions and of loops; ``None`` for an unencrypted connection."""
    cipher_query = "SELECT cipher FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
    async with outbox.transaction("Look") as tx:
        of_actions = await tx.fetchval(cipher_query)
    database = database_of(outbox)
    of_loops = (await database._admin.fetch(cipher_query))[0][0]  # type: ignore[attr-defined]
    return {of_actions, of_loops}


async def test_each_tls_mode_works_as_documented(postgres_url: str, tls: Certificates) -> None:
    ours, another = tls["ours"], tls["another"]
    for url in (
        postgres_url,  # prefer
        with_mode(postgres_url, "require"),
        with_mode(postgres_url, "verify-ca", ours),
        with_mode(postgres_url, "verify-ca", ours, host="localhost"),
        with_mode(postgres_url, "verify-full", ours),
    ):
        async with Outbox(url, namespace="app") as outbox:
            await outbox.migrate()
            await outbox.executor.execute(Emit((1,)))
            assert None not in await ciphers(outbox), url

    for url in (
        with_mode(postgres_url, "verify-ca", another),
        with_mode(postgres_url, "verify-full", another),
        with_mode(postgres_url, "verify-full", ours, host="localhost"),
    ):
        async with Outbox(url, namespace="app") as outbox:
            with pytest.raises(DatabaseUnavailable, match="certificate"):
                await outbox.check()
            with pytest.raises(DatabaseUnavailable, match="certificate"):
                await outbox.executor.execute(Emit((1,)))


async def test_a_server_without_tls_is_refused_where_tls_is_required(postgres_url: str, tmp_path: Path) -> None:
    if await Look(postgres_url).value("SHOW ssl") == "on":
        pytest.skip("this server has TLS")
    for mode in ("require", "verify-full"):
        async with Outbox(with_mode(postgres_url, mode), namespace="app") as outbox:
            with pytest.raises(DatabaseUnavailable, match=r"(?i)ssl|root"):
                await outbox.executor.execute(Emit((1,)))
    async with Outbox(with_mode(postgres_url, "prefer"), namespace="app") as outbox:
        await outbox.migrate()
        assert await ciphers(outbox) == {None}


async def test_mysqls_own_authority_certifies_it_but_not_its_host_name(mysql_url: str) -> None:
    authority = Path(await Look(mysql_url).value("SELECT @@datadir")) / "ca.pem"
    if not os.access(authority, os.R_OK):
        pytest.skip("this server has not created its own authority, or it cannot be read")

    def url_with(mode: str) -> str:
        return urlsplit(mysql_url)._replace(query=f"ssl_mode={mode}&ssl_ca={authority}").geturl()

    async with Outbox(url_with("VERIFY_CA"), namespace="app") as outbox:
        await outbox.migrate()
        async with outbox.transaction("Look") as tx:
            assert (await tx.fetchrow("SHOW SESSION STATUS LIKE 'Ssl_cipher'"))[1]
    async with Outbox(url_with("VERIFY_IDENTITY"), namespace="app") as outbox:
        with pytest.raises(DatabaseUnavailable, match="certificate"):
            await outbox.check()
