"""``verify`` accepts signed requests, and refuses requests that differ in one byte."""

from __future__ import annotations

import base64
import hmac
import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from outboxio import ConfigurationError, InvalidEvent, InvalidSignature, OutboxError, SettingsError
from outboxio.integrations.webhooks import verify
from outboxio.support import machine

Headers = dict[str, str]
Sign = Callable[..., Headers]

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OLD = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
BODY = json.dumps({"id": "evt_1", "event_id": "Ev1", "text": "grün"}, ensure_ascii=False).encode()
DECADES = "36500d"
NOW = 1_764_000_000


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "time_ns", lambda: NOW * 10**9)


def digest(secret: str, signed: bytes) -> str:
    return hmac.new(secret.encode(), signed, sha256).hexdigest()


def standard(body: bytes = BODY, secret: str = KEY, at: int = NOW) -> Headers:
    signature = Webhook(secret).sign("msg_1", datetime.fromtimestamp(at, UTC), body.decode())
    return {"webhook-id": "msg_1", "webhook-timestamp": str(at), "webhook-signature": signature}


def stripe(body: bytes = BODY, secret: str = KEY, at: int = NOW) -> Headers:
    return {"stripe-signature": f"t={at},v1={digest(secret, f'{at}.'.encode() + body)}"}


def github(body: bytes = BODY, secret: str = KEY, at: int = NOW) -> Headers:
    return {"x-github-delivery": "72d3162e", "x-hub-signature-256": f"sha256={digest(secret, body)}"}


def slack(body: bytes = BODY, secret: str = KEY, at: int = NOW) -> Headers:
    signature = digest(secret, f"v0:{at}:".encode() + body)
    return {"x-slack-request-timestamp": str(at), "x-slack-signature": f"v0={signature}"}


SCHEMES: dict[str, tuple[Sign, str]] = {
    "standard": (standard, "msg_1"),
    "stripe": (stripe, "evt_1"),
    "github": (github, "72d3162e"),
    "slack": (slack, "Ev1"),
}
each = pytest.mark.parametrize("scheme", SCHEMES)
timed = pytest.mark.parametrize("scheme", ["standard", "stripe", "slack"])


def check(scheme: str, headers: Any, body: Any = BODY, secrets: Any = KEY, **options: Any) -> str:
    return verify(headers, body, secrets, scheme=scheme, **options)  # type: ignore[arg-type]


def refused(scheme: str, headers: Any, body: bytes = BODY, secrets: Any = KEY, **options: Any) -> InvalidSignature:
    with pytest.raises(InvalidSignature) as raised:
        check(scheme, headers, body, secrets, **options)
    return raised.value


def test_the_published_example_of_standard_webhooks_is_valid() -> None:
    headers = {
        "Webhook-Id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "Webhook-Timestamp": "1614265330",
        "Webhook-Signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    found = verify(headers, b'{"test": 2432232314}', KEY, tolerance=DECADES)

    assert found == "msg_p5jXN8AQM9LWM0D4loKWxJek"


def test_the_published_example_of_github_is_valid() -> None:
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    headers = {"X-Hub-Signature-256": signature, "X-GitHub-Delivery": "72d3162e"}

    assert verify(headers, b"Hello, World!", "It's a Secret to Everybody", scheme="github") == "72d3162e"


def test_the_published_example_of_slack_is_valid() -> None:
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V"
        b"&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text="
        b"&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554"
        b"%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    headers = {
        "X-Slack-Request-Timestamp": "1531420618",
        "X-Slack-Signature": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
    }
    found = verify(headers, body, "8f742231b10e8888abcd99yyyzzz85a5", scheme="slack", tolerance=DECADES)

    assert found == f"sha256-{sha256(body).hexdigest()}"


@each
def test_a_signed_request_has_the_id_of_the_provider(scheme: str) -> None:
    sign, id = SCHEMES[scheme]

    assert check(scheme, sign()) == id


def test_standard_webhooks_are_the_default() -> None:
    assert verify(standard(), BODY, KEY) == "msg_1"


@each
def test_headers_are_found_in_any_case_and_form(scheme: str) -> None:
    sign, id = SCHEMES[scheme]
    headers = sign()
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]

    for form in ({n.upper(): v for n, v in headers.items()}, list(headers.items()), pairs, iter(pairs)):
        assert check(scheme, form) == id


@each
def test_a_changed_byte_of_the_body_is_refused(scheme: str) -> None:
    headers = SCHEMES[scheme][0]()
    for index in range(len(BODY)):
        changed = bytearray(BODY)
        changed[index] ^= 1
        refused(scheme, headers, bytes(changed))
    for changed_body in (BODY[:-1], BODY + b" ", b" " + BODY, b"", BODY.decode().encode("utf-16")):
        refused(scheme, headers, changed_body)


@each
def test_a_changed_byte_of_a_signed_header_is_refused(scheme: str) -> None:
    headers = SCHEMES[scheme][0]()
    headers.pop("x-github-delivery", None)  # GitHub does not sign it
    extra = {"x-github-delivery": "72d3162e"}
    for name, value in headers.items():
        for index, one in enumerate(value):
            for changed in (value[:index] + chr(ord(one) ^ 1) + value[index + 1 :], value[:index] + value[index + 1 :]):
                refused(scheme, {**extra, **headers, name: changed}, tolerance=DECADES)


@each
@given(body=st.binary(max_size=200))
def test_any_other_body_is_refused(scheme: str, body: bytes) -> None:
    if body != BODY:
        refused(scheme, SCHEMES[scheme][0](), body)


@each
@given(value=st.text(max_size=100))
def test_any_other_signature_is_refused(scheme: str, value: str) -> None:
    headers = SCHEMES[scheme][0]()
    refused(scheme, {name: value if "signature" in name else other for name, other in headers.items()})


@each
def test_a_signed_body_without_an_id_is_an_invalid_event(scheme: str) -> None:
    sign, id = SCHEMES[scheme]
    for body in (b"[]", b"null", b"payload=%7B%7D", b"", b'{"id": 5}', b'{"id": " "}', b'{"x":' + b"[" * 9999):
        if scheme == "stripe":
            with pytest.raises(InvalidEvent, match="it is not a JSON object with an id"):
                check(scheme, sign(body), body)
        else:
            assert check(scheme, sign(body), body) == (
                f"sha256-{sha256(body).hexdigest()}" if scheme == "slack" else id
            )


def test_a_signed_body_that_is_not_utf_8_is_answered() -> None:
    body = b'{"id": "\xff"}'
    with pytest.raises(InvalidEvent):
        check("stripe", stripe(body), body)

    assert check("github", github(body), body) == "72d3162e"
    assert check("slack", slack(body), body).startswith("sha256-")
    assert "not UTF-8" in str(refused("standard", standard(), body))


@each
def test_one_of_several_secrets_is_enough(scheme: str) -> None:
    sign, id = SCHEMES[scheme]

    for secret in (OLD, KEY):
        assert check(scheme, sign(secret=secret), secrets=[KEY, OLD]) == id
        assert check(scheme, sign(secret=secret), secrets=iter((OLD, KEY))) == id
    refused(scheme, sign(secret=OLD))


def test_one_of_several_signatures_is_enough() -> None:
    two = f"{standard(secret=OLD)['webhook-signature']} v1a,x v2 {standard()['webhook-signature']}"
    assert check("standard", {**standard(), "webhook-signature": two}) == "msg_1"

    value = f"t={NOW},v0=5,v1={'0' * 64},{stripe()['stripe-signature'].partition(',')[2]}"
    assert check("stripe", {"Stripe-Signature": value}) == "evt_1"


def test_a_secret_is_text_or_bytes_and_the_prefix_is_optional() -> None:
    raw = base64.b64decode(KEY.removeprefix("whsec_"))

    assert check("standard", standard(), secrets=KEY.removeprefix("whsec_")) == "msg_1"
    assert check("standard", standard(), secrets=[raw]) == "msg_1"
    for scheme in ("stripe", "github", "slack"):
        assert check(scheme, SCHEMES[scheme][0](), secrets=KEY.encode()) == SCHEMES[scheme][1]


@timed
def test_the_time_of_signing_must_be_within_the_tolerance(scheme: str) -> None:
    sign, id = SCHEMES[scheme]

    for at in (NOW - 300, NOW + 300):
        assert check(scheme, sign(at=at)) == id
    for at, where in ((NOW - 301, "ago"), (NOW + 301, "in the future")):
        assert re.search(f"signed 301 s {where}; the tolerance is 5m", str(refused(scheme, sign(at=at))))
        assert check(scheme, sign(at=at), tolerance="10m") == id
    refused(scheme, sign(at=NOW - 30), tolerance=10)


@pytest.mark.parametrize("wrong", ["", " 1614265330", "+1614265330", "01614265330", "1614265330.5", "1e9", "-5", "٣"])
def test_a_time_has_one_spelling(wrong: str) -> None:
    refused("standard", {**standard(), "webhook-timestamp": wrong}, tolerance=DECADES)
    refused("slack", {**slack(), "x-slack-request-timestamp": wrong}, tolerance=DECADES)
    refused("stripe", {"stripe-signature": f"t={wrong},v1=0"}, tolerance=DECADES)


def test_two_times_in_a_signature_are_refused() -> None:
    value = stripe()["stripe-signature"]
    time_part, signature = value.split(",")

    assert "Unix time" in str(refused("stripe", {"stripe-signature": f"{time_part},{value}"}))
    assert "Unix time" in str(refused("stripe", {"stripe-signature": signature}))


@each
def test_a_header_must_be_present_exactly_once(scheme: str) -> None:
    headers = SCHEMES[scheme][0]()
    for name in headers:
        expected = re.compile(f"the header {name} is missing, was sent more than once, or is not ASCII", re.IGNORECASE)
        for wrong in (
            [pair for pair in headers.items() if pair[0] != name],
            [*headers.items(), (name, headers[name])],
            [*headers.items(), (name.title(), "other")],
            {**headers, name: ""},
            {**headers, name: headers[name] + "é"},
        ):
            assert expected.search(str(refused(scheme, wrong)))


@each
def test_an_error_shows_neither_secret_nor_signature(scheme: str) -> None:
    sign, _ = SCHEMES[scheme]
    error = refused(scheme, sign(secret=OLD))
    valid = re.split("[=, ]", list(sign().values())[-1])[-2 if scheme == "standard" else -1]

    assert isinstance(error, OutboxError)
    assert (error.scheme, error.reason in str(error)) == (scheme, True)
    assert not any(hidden in repr(error) + str(error) for hidden in (KEY, KEY[6:], OLD, valid))


@each
@pytest.mark.parametrize("body", [BODY.decode(), json.loads(BODY), None, bytearray(BODY)], ids=type)
def test_a_decoded_body_is_refused(scheme: str, body: object) -> None:
    name = type(body).__name__
    with pytest.raises(ConfigurationError, match=f"body is a {name}; pass the raw bytes of the request"):
        check(scheme, SCHEMES[scheme][0](), body)


@each
@pytest.mark.parametrize("secrets", ["", " ", b"", None, [], [KEY, ""], [None], [5]], ids=repr)
def test_an_empty_secret_is_refused(scheme: str, secrets: object) -> None:
    with pytest.raises(ConfigurationError, match="non-empty secrets"):
        check(scheme, SCHEMES[scheme][0](), secrets=secrets)


@pytest.mark.parametrize("secret", ["whsec_", "whsec_x", "not-base-64-é"])
def test_a_malformed_secret_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        verify(standard(), BODY, [KEY, secret])

    assert str(raised.value) == "secrets: expected base64, with or without whsec_ before it, or bytes"
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("headers", [None, 5, ["webhook-id"], {"webhook-id": ["a", "b"]}, {1: "x"}, [("a", "b", "c")]])
def test_headers_of_another_form_are_refused(headers: object) -> None:
    with pytest.raises(ConfigurationError, match="headers: expected a mapping of str to str, or pairs"):
        check("standard", headers)


def test_an_unknown_scheme_and_a_wrong_tolerance_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown scheme 'strip': .*stripe"):
        check("strip", stripe())
    with pytest.raises(SettingsError, match="tolerance = -5"):
        check("stripe", stripe(), tolerance=-5)


def test_only_standard_webhooks_need_a_library() -> None:
    code = f"""
import sys
sys.modules["standardwebhooks"] = sys.modules["httpx"] = None
from outboxio.integrations.webhooks import verify
print(verify({github()!r}, {BODY!r}, {KEY!r}, scheme="github"))
verify({standard()!r}, {BODY!r}, {KEY!r})
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert run.stdout == "72d3162e\n"
    assert (
        "ConfigurationError: scheme 'standard' needs standardwebhooks: pip install 'outboxio[webhooks]'" in run.stderr
    )
