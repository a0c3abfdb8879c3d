"""``outboxio watch`` posts findings to a webhook, which is a real server here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta

import pytest

from outboxio import Finding, Outbox, RetryPolicy, Unprocessable
from outboxio.cli.commands import watch as command
from outboxio.cli.commands.watch import NotPosted, Webhook, message_of, watch
from outboxio.cli.options import remember
from outboxio.cli.output import Exit
from outboxio.cli.target import TargetError
from outboxio.health import overview
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, MoneyDeposited
from tests.kit.ports import free_port
from tests.kit.webhooks import Receiver, webhook

pytestmark = [pytest.mark.with_tables, pytest.mark.above_statements]

MakeOutbox = Callable[..., Awaitable[Outbox]]

NOON = datetime(2030, 1, 1, 12)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "FRESH", 0.0)
    monkeypatch.setattr(command, "_PAUSES", (0.0, 0.0))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with webhook() as found:
        yield found


async def once(outbox: Outbox, receiver: Receiver) -> Exit:
    return await watch(outbox, receiver.url, 15, once=True, as_json=False)


def finding(**fields: object) -> Finding:
    given = {"rule": "new_dead", "level": "degraded", "text": "`mail` is <dead> & gone.", "fix": "outboxio dead"}
    return Finding(**{**given, **fields})  # type: ignore[arg-type]  # the fields have different types


async def test_findings_are_posted_once_at_their_start_and_end(
    make_outbox: MakeOutbox, clock: MovableClock, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox = await make_outbox(clock=clock)
    mail = Journal(lambda envelope: Unprocessable("never"))
    outbox.handler(MoneyDeposited, name="mail", retry=RetryPolicy(max_attempts=1))(mail)
    assert (await once(outbox, receiver), receiver.texts) == (Exit.OK, [])

    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    for _ in range(2):  # a process each, as cron starts them
        assert await once(outbox, receiver) is Exit.FAILED
    [dead] = [text for text in receiver.texts if "new_dead" in text]
    assert "*degraded*: 1 notification of `mail` ended DEAD" in dead
    assert "\nfix: `outboxio dead --handler mail`\n" in dead
    assert dead.endswith("_in `app`, rule `new_dead`, since 2030-01-01 12:00 UTC_")
    assert "notification of mail ended DEAD" in capsys.readouterr().out.replace("`", "")

    clock.advance("61m")
    for _ in range(3):
        await once(outbox, receiver)
    [ended] = [text for text in receiver.texts[1:] if "new_dead" in text and text != dead]
    assert "ended after 61 min: 1 notification of `mail` ended DEAD" in ended
    assert all(body.keys() == {"text"} for body in receiver.bodies)


async def test_a_failed_post_is_retried_and_fails_the_command(
    make_outbox: MakeOutbox, clock: MovableClock, receiver: Receiver
) -> None:
    outbox = await make_outbox(clock=clock)
    to = Webhook(receiver.url, outbox, as_json=False)
    receiver.answers = [500, 429]
    await to.post(finding())
    assert (receiver.requests, len(receiver.texts)) == (3, 1)

    receiver.answers = [503] * 3
    with pytest.raises(NotPosted, match="the webhook returned 503 Service Unavailable"):
        await to.post(finding())
    for code in (302, 404):
        receiver.answers, receiver.requests = [code], 0
        with pytest.raises(NotPosted, match=f"the webhook returned {code}"):
            await to.post(finding())
        assert receiver.requests == 1, "another request would not help"


async def test_an_unreachable_webhook_is_named_without_its_secret(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = await make_outbox(clock=clock)
    outbox.handler(MoneyDeposited, name="mail")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()  # afterwards no process runs, which is a finding

    url = f"http://127.0.0.1:{free_port()}/services/s3cret"
    for _ in range(2):
        assert await watch(outbox, url, 15, once=True, as_json=False) is Exit.FAILED

    assert "the webhook at 127.0.0.1 cannot be reached" in caplog.text
    assert "s3cret" not in caplog.text


async def test_a_second_watcher_posts_nothing(
    make_outbox: MakeOutbox, clock: MovableClock, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox = await make_outbox(clock=clock)
    outbox.handler(MoneyDeposited, name="mail")(Journal())
    await outbox.drain()
    first = command.finding_watch(
        await make_outbox(clock=clock), Webhook(receiver.url, outbox, as_json=False).receiver, _ignore,
        every=15, starts=True,
    )  # fmt: skip
    await first.run_once()
    await outbox.executor.execute(Emit((1,)))

    await once(outbox, receiver)

    assert receiver.texts == []
    assert "another outboxio watch already posts to this webhook" in capsys.readouterr().err
    await first.close()


async def _ignore(finding: Finding) -> None: ...


@pytest.mark.parametrize("url", ["hooks.slack.com/x", "ftp://example.org/x", "file:///etc/passwd", "https://"])
async def test_a_webhook_url_that_is_not_http_is_refused(make_outbox: MakeOutbox, url: str) -> None:
    with pytest.raises(TargetError, match="--webhook expects an http"):
        Webhook(url, await make_outbox(), as_json=False)


def test_messages_are_escaped_and_name_the_outbox() -> None:
    remember("app.main:outbox", None, None)
    text = message_of(finding(since=NOON), "shop")
    assert "`mail` is &lt;dead&gt; &amp; gone." in text
    assert "fix: `outboxio dead app.main:outbox`" in text
    assert "since 2030-01-01 12:00 UTC" in text
    remember(None, None, None)
    ended = message_of(finding(since=NOON, ended=NOON + timedelta(minutes=14)), "shop")
    assert "ended after 14 min: " in ended
    assert "fix" not in ended
