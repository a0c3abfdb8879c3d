"""The client of a mail service. This one only logs: replace it with the client of your provider."""

import logging

logger = logging.getLogger(__name__)


class Mailer:
    async def send(self, to: str, subject: str, *, key: str) -> None:
        """Send a mail. The provider ignores a ``key`` that it has already seen."""
        logger.info("mail to %s: %s", to, subject)
