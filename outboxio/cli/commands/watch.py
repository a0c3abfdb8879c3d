"""``outboxio watch``: posts findings to a webhook, from outside the monitored processes."""

from __future__ import annotations

import asyncio
import sys
import urllib.error
import urllib.request
from datetime import datetime
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

import msgspec

from outboxio.cli.commands import glance
from outboxio.cli.commands.worker import signalled
from outboxio.cli.internals import finding_watch
from outboxio.cli.options import with_outbox
from outboxio.cli.output import Exit, echo, echo_json_lines, echo_stderr, line, span, timestamp
from outboxio.cli.target import TargetError
from outboxio.health.notices import FindingWatch
from outboxio.health.values import Finding
from outboxio.outbox import Outbox

_TIMEOUT = 8.0  # seconds per request
_PAUSES = (1.0, 3.0)  # seconds before each retry
_MAX_POST = 600.0  # seconds: posts wait for each other, and each has its own limits
_MAX_PAUSE = 10.0  # seconds of Retry-After that are respected; after that, the next evaluation retries
_MARKS = {"ok": "\N{LARGE GREEN CIRCLE}", "degraded": "\N{LARGE YELLOW CIRCLE}", "down": "\N{LARGE RED CIRCLE}"}
_ENDED = "\N{WHITE HEAVY CHECK MARK}"


class NotPosted(Exception):
    """The webhook has rejected a message, or cannot be reached."""

    def __init__(self, reason: str, *, pause: float | None) -> None:
        super().__init__(reason)
        self.pause = pause
        """The seconds to wait before a retry; ``None`` if retrying is pointless."""


class Webhook:
    """Posts findings as JSON with a ``text``, for Slack and Mattermost. The URL is a secret and is never shown."""

    def __init__(self, url: str, outbox: Outbox, *, as_json: bool, is_quiet: bool = False) -> None:
        """``is_quiet``: do not print the findings."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TargetError(
                "--webhook expects an http:// or https:// URL, as in https://hooks.slack.com/services/..."
            )
        self.receiver = f"webhook {sha256(url.encode()).hexdigest()[:16]}"
        self._url = url
        self._namespace = outbox.namespace
        self._as_json, self._is_quiet = as_json, is_quiet
        self._turn = asyncio.Lock()  # such services accept about one message per second

    async def post(self, finding: Finding) -> None:
        """Post a finding. Raises :class:`NotPosted` after three requests."""
        body = msgspec.json.encode({"text": message_of(finding, self._namespace)})
        async with self._turn:
            for pause in (*_PAUSES, None):
                try:
                    await asyncio.to_thread(_request, self._url, body)
                    break
                except NotPosted as error:
                    if pause is None or error.pause is None:
                        raise
                    await asyncio.sleep(min(max(pause, error.pause), _MAX_PAUSE))
        if not self._is_quiet:
            self._print(finding)

    def _print(self, finding: Finding) -> None:
        if self._as_json:
            echo_json_lines([finding])
            return
        label, colour = ("ended", "green") if finding.ended else (finding.level, "bold red")
        echo(line(timestamp(finding.ended or finding.since), "  ", (label, colour), f"  {finding.text}"))
        sys.stdout.flush()


async def watch(outbox: Outbox, webhook: str, every: float, *, once: bool, as_json: bool) -> Exit:
    """Post findings until a signal arrives; with ``once``, evaluate them once and exit like ``outboxio doctor``."""
    to = Webhook(webhook, outbox, as_json=as_json, is_quiet=once)
    notifier = finding_watch(outbox, to.receiver, to.post, every=every, starts=True, longest=_MAX_POST)
    try:
        return await (_once(outbox, notifier, as_json=as_json) if once else _until_signal(notifier, every))
    finally:
        await notifier.close()


async def _once(outbox: Outbox, notifier: FindingWatch, *, as_json: bool) -> Exit:
    await notifier.run_once()
    if not notifier.leads:
        echo_stderr(line(("another outboxio watch already posts to this webhook; nothing was posted", "yellow")))
    code = await glance.doctor(outbox, as_json=as_json)
    return max(code, Exit.FAILED) if notifier.has_failed else code


async def _until_signal(notifier: FindingWatch, every: float) -> Exit:
    """Run until a signal arrives. The first evaluation raises configuration errors."""

    async def work() -> None:
        await notifier.run_once()
        await asyncio.sleep(every)
        await notifier.run()

    with signalled() as stop:
        working, stopping = asyncio.create_task(work()), asyncio.create_task(stop.wait())
        ended, _ = await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stopping not in ended:
            working.result()
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
    return Exit.OK


def message_of(finding: Finding, namespace: str) -> str:
    """Return the text of a message, in Slack markup."""
    where = f"in `{namespace}`, rule `{finding.rule}`"
    if finding.ended is not None:
        lasted = (
            "" if finding.since is None else f" after {span(max(0.0, (finding.ended - finding.since).total_seconds()))}"
        )
        return f"{_ENDED} ended{lasted}: {_escaped(finding.text)}\n_{_escaped(where)}_"
    since = "" if finding.since is None else f", since {_to_the_minute(finding.since)}"
    fix = f"\nfix: `{_escaped(with_outbox(finding.fix))}`" if finding.fix else ""
    mark = f"{_MARKS[finding.level]} *{finding.level}*"
    return f"{mark}: {_escaped(finding.text)}{fix}\n_{_escaped(where + since)}_"


def _to_the_minute(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a redirected POST would become a GET, and the message would be lost."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


def _request(url: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "outboxio"}
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        is_busy = error.code == 429 or error.code >= 500
        delay = error.headers.get("Retry-After", "")
        pause = float(delay) if delay.isascii() and delay.isdigit() else 0.0
        raise NotPosted(f"the webhook returned {error.code} {error.reason}", pause=pause if is_busy else None) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise NotPosted(f"the webhook at {urlsplit(url).hostname} cannot be reached: {reason}", pause=0.0) from None
