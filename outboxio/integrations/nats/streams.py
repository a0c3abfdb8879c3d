"""The streams of a server: which of them takes a subject.

A reply in the form of an acknowledgement may come from anyone who receives the message. So the relay checks that the
named stream is there and takes the subject. The subjects of a stream are read once for each connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg

from outboxio.integrations.nats.connection import NoStream
from outboxio.integrations.nats.publisher import NO_STREAM, Answer, Outgoing, Publisher, Read, Refusal, no_responders

API = "$JS.API.STREAM"
ANSWER = 2.0  # seconds
NOT_FOUND = 404
NOT_ENABLED = 10039  # JetStream, for the account
_NAME = re.compile(r"[^\s.*>/\\]+\Z")


class _Config(Struct):
    subjects: list[str] | None = None


class _Found(Struct):
    """The reply to STREAM.INFO, with ``config``, or to STREAM.NAMES, with ``streams``."""

    type: str
    config: _Config | None = None
    streams: list[str] | None = None
    error: Refusal | None = None


_decode = msgspec.json.Decoder(_Found).decode


class Streams:
    """The streams that a connection can see."""

    def __init__(self, publisher: Publisher, expected: str | None) -> None:
        """``expected``: the only stream whose acknowledgements are read, which needs no check."""
        self._publisher = publisher
        self._matchers: dict[str, Callable[[str], object]] = {}
        self._accepts_all = expected is not None
        """True if streams need no check, or cannot be checked: a server may forbid a user to read them."""

    async def checked(self, subjects: Sequence[str], answers: Sequence[Answer]) -> list[Answer]:
        """The answers to messages, as far as the server's streams confirm them.

        An acknowledgement by a stream that does not take the subject becomes a :class:`NoStream`. So does a missing
        answer if the subject has no stream: a subscriber that does not reply would look like a server that is away.
        """
        doubtful = {by for subject, by in zip(subjects, answers, strict=True) if not self._confirms(by, subject)}
        if doubtful:
            await self._read(doubtful)
        silent = {subject for subject, by in zip(subjects, answers, strict=True) if isinstance(by, TimeoutError)}
        absent = await self._without_stream(sorted(silent)) if silent else ()
        return [
            NO_STREAM if isinstance(by, TimeoutError) and subject in absent
            else by if self._confirms(by, subject)
            else NoStream(subject, str(by))
            for subject, by in zip(subjects, answers, strict=True)
        ]  # fmt: skip

    def _confirms(self, answer: Answer, subject: str) -> bool:
        """False for the name of a stream that does not take the subject, as far as :meth:`_read` has found."""
        if self._accepts_all or not isinstance(answer, str):
            return True
        matches = self._matchers.get(answer)
        return matches is not None and matches(subject) is not None

    async def _read(self, streams: Iterable[Answer]) -> None:
        """Read the subjects of streams."""
        for stream in map(str, streams):
            self._matchers.pop(stream, None)
            if not _NAME.match(stream):
                continue
            [answer] = await self._request("INFO", [Outgoing(f"{API}.INFO.{stream}", b"", {})])
            if isinstance(answer, str):
                self._matchers[stream] = _matcher(answer.split())
            elif not isinstance(answer, Refusal) or not _is_absence(answer):
                self._accepts_all = True

    async def _without_stream(self, subjects: Sequence[str]) -> set[str]:
        """The subjects for which the server has no stream. A subject about which nothing is known is left out."""
        requests = [Outgoing(f"{API}.NAMES", msgspec.json.encode({"subject": one}), {}) for one in subjects]
        answers = await self._request("NAMES", requests)
        return {one for one, answer in zip(subjects, answers, strict=True) if answer == ""}

    async def _request(self, kind: str, requests: Sequence[Outgoing]) -> Sequence[Answer]:
        return await self._publisher.publish(requests, ANSWER, _READS[kind])


def _reader(kind: str) -> Read:
    def read(message: Msg) -> Answer | None:
        """Subjects or names, with spaces between, or an error; ``None`` for a reply that is not from JetStream."""
        if not message.data:
            return no_responders(message)
        try:
            found = _decode(message.data)
        except msgspec.DecodeError:
            return None
        if found.type != f"io.nats.jetstream.api.v1.stream_{kind.lower()}_response":
            return None
        names = found.streams if found.config is None else found.config.subjects
        return found.error or " ".join(names or ())

    return read


_READS = {kind: _reader(kind) for kind in ("INFO", "NAMES")}


def _is_absence(refusal: Refusal) -> bool:
    return refusal is NO_STREAM or refusal.code == NOT_FOUND or refusal.err_code == NOT_ENABLED


def _matcher(patterns: Iterable[str]) -> Callable[[str], object]:
    """Matches the subjects of patterns such as ``orders.*.paid`` and ``wallets.>``."""
    wild = {"*": r"[^.]+", ">": ".+"}
    parts = (r"\.".join(wild.get(token) or re.escape(token) for token in one.split(".")) for one in patterns)
    return re.compile("|".join(f"(?:{part})" for part in parts) or r"(?!)").fullmatch
