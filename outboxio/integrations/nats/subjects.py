"""Subjects of NATS: which are valid, and how a value becomes a part of one."""

from __future__ import annotations

import re

from outboxio.errors import ConfigurationError
from outboxio.integrations.brokers.template import Template

_ODD = re.compile(r"[\s*>%\x00-\x1f\x7f]")
_RESERVED = re.compile(r"\$|_(?:INBOX|R_|GR_)(?:\.|\Z)")
"""The start of the subjects of the server itself (``$JS.API``, ``$SYS``), and of replies."""
_VALID = re.compile(r"[^\s*>.\x00-\x1f\x7f]+(\.[^\s*>.\x00-\x1f\x7f]+)*\Z")


def as_part(value: str) -> str:
    """A value as a part of a subject. Wildcards, white space and empty tokens are percent-encoded; dots stay."""
    if _ODD.search(value):
        value = _ODD.sub(lambda odd: "".join(f"%{byte:02X}" for byte in odd[0].encode()), value)
    return value if _VALID.match(value) else value.replace(".", "%2E")


def as_subject(text: str) -> str:
    """A subject of which values are a part. A start that is reserved for the server is percent-encoded."""
    return f"%{ord(text[0]):02X}{text[1:]}" if _RESERVED.match(text) else text


def subject_template(text: str) -> Template:
    """The template of a subject. :class:`ConfigurationError` for a text that makes no valid subject.

    Example::

        subject_template("wallets.{event_type}")
    """
    is_bucket = text.startswith("$KV.")  # a key-value bucket, whose subjects belong to a stream
    template = Template(text, option="subject", fit=as_part, fit_whole=str if is_bucket else as_subject)
    example = template.example()
    if not _VALID.match(example):
        raise ConfigurationError(
            f"subject={text!r} makes subjects such as {example!r}: tokens between dots must not be empty, and must "
            "have no white space and no wildcard * or >"
        )
    if _RESERVED.match(example) and not is_bucket:
        raise ConfigurationError(
            f"subject={text!r} makes subjects such as {example!r}, which are reserved for the server and for replies, "
            "so that no stream takes them: begin with another token"
        )
    return template
