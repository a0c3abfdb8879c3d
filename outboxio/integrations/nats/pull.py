"""Pulls messages of a durable consumer of JetStream, in batches, with one subscription and no task for each message."""

from __future__ import annotations

# nats-py leaves some parameters without types.
# pyright: reportUnknownMemberType=false
import asyncio
import re

import msgspec
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from outboxio.support.log import log_of
from outboxio.support.text import briefly

logger = log_of(__name__)

WAIT = 0.5  # seconds that a pull waits for the first message
ANSWER = 5.0  # seconds that the server may take beyond that


class PullFailed(ConnectionError):
    """The server did not answer a pull, or answered with an error."""


class Delivery(Struct, frozen=True, gc=False):
    """A message of the consumer, with its number in the stream, and its number among the deliveries."""

    message: Msg
    sequence: int
    number: int


class Puller:
    """Pulls from one consumer. A message belongs to the pull that waits, and messages keep the order of the stream.

    A message counts only if its reply subject is that of an acknowledgement to this consumer. Anyone who knows the
    subject of a pull could send others, and an acknowledgement would be published to a subject of the sender's choice.
    """

    def __init__(self, client: Client, stream: str, durable: str) -> None:
        self._client = client
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._inbox = client.new_inbox()
        self._number = 0
        self._most = 0
        self._subject = ""
        self._messages: list[Delivery] = []
        self._delivered = re.compile(
            rf"\$JS\.ACK\.(?:[^.]+\.[^.]+\.)?{re.escape(stream)}\.{re.escape(durable)}"
            r"\.\d+\.(\d+)\.(\d+)\.\d+\.\d+(?:\.[^.]+)*"
        ).fullmatch
        """Matches ``$JS.ACK.<stream>.<consumer>.<count>.<stream sequence>.<consumer sequence>.<time>.<pending>``, and
        the form with domain and account in front."""
        self._has_warned = False
        self._ended: asyncio.Future[str] | None = None
        self._subscription: Subscription | None = None

    async def subscribe(self) -> None:
        """Begin to listen for answers."""
        self._subscription = await self._client.subscribe(
            f"{self._inbox}.*", cb=self._take, pending_msgs_limit=-1, pending_bytes_limit=-1
        )

    async def unsubscribe(self) -> None:
        """End to listen."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def lost(self) -> None:
        """End the pull that waits: the connection is gone."""
        self._end("the connection is closed")

    async def fetch(self, most: int) -> list[Delivery]:
        """The next messages, up to ``most``: those that are there, or else the first that comes within 0.5 s."""
        messages = await self._pull(most, {"batch": most, "no_wait": True}, 0)
        if not messages:
            messages = await self._pull(1, {"batch": 1, "expires": int(WAIT * 1e9)}, WAIT)
        return messages

    async def _pull(self, most: int, request: dict[str, int | bool], wait: float) -> list[Delivery]:
        self._number += 1
        self._most = most
        self._subject = f"{self._inbox}.{self._number}"
        self._ended = asyncio.get_running_loop().create_future()
        try:
            await self._client.publish(self._next, msgspec.json.encode(request), reply=self._subject)
            async with asyncio.timeout(wait + ANSWER):
                problem = await self._ended
        except TimeoutError:
            problem = f"the server has not answered a pull within {wait + ANSWER:g} s"
        finally:
            self._ended = None
        messages, self._messages = self._messages, []
        if problem and not messages:
            raise PullFailed(problem)
        return messages

    async def _take(self, message: Msg) -> None:
        status = message.headers.get("Status") if message.headers and not message.data else None
        if status is not None and not message.reply:
            if message.subject == self._subject and status not in ("100",):
                told = (message.headers or {}).get("Description", "")
                is_usual = status in ("404", "408") or "completed" in told.lower()
                self._end("" if is_usual else f"the server has refused a pull: {status} {told}")
            return
        found = self._delivered(message.reply)
        if found is None:
            self._ignore(message)
            return
        self._messages.append(Delivery(message, int(found[1]), int(found[2])))
        if len(self._messages) >= self._most:
            self._end("")

    def _ignore(self, message: Msg) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "ignored a message on %s that JetStream has not delivered (reply subject %s); no further such message "
                "of this connection is logged",
                message.subject, briefly(message.reply),
            )  # fmt: skip

    def _end(self, problem: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(problem)
