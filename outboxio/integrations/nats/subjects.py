"""Subjects of NATS: which are valid, and how a value becomes a part of one."""

from __future__ import annotations

import re

from outboxio.errors import ConfigurationError
from outboxio.integrations.brokers.template import Template

_ODD = re.compile(r"[\s*>%\x00-\x1f\x7f]")
_VALID = re.compile(r"[^\s*>.\x00-\x1f\x7f]+(\.[^\s*>.\x00-\x1f\x7f]+)*\Z")


def as_part(value: str) -> str:
    """A value as a part of a subject. Wildcards, white space and empty tokens are percent-encoded; dots stay."""
    if _ODD.search(value):
        value = _ODD.sub(lambda odd: "".join(f"%{byte:02X}" for byte in odd[0].encode()), value)
    return value if _VALID.match(value) else value.replace(".", "%2E")


def subject_template(text: str) -> Template:
    """The template of a subject. :class:`ConfigurationError` for a text that makes no valid subject.

    Example::

        subject_template("wallets.{event_type}")
    """
    template = Template(text, option="subject", fit=as_part)
    example = template.example()
    if not _VALID.match(example):
        raise ConfigurationError(
            f"subject={text!r} makes subjects such as {example!r}: tokens between dots must not be empty, and must "
            "have no white space and no wildcard * or >"
        )
    return template
