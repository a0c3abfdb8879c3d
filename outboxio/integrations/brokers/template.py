"""Templates of destinations, such as ``"wallets.{event_type}"``, checked when a relay is made."""

from __future__ import annotations

import string
from collections.abc import Callable

from outboxio.errors import ConfigurationError, Unprocessable
from outboxio.integrations.brokers.message import Message
from outboxio.support.text import briefly, instead_of

_FIELDS: dict[str, Callable[[Message], str | None]] = {
    "event_type": lambda message: message.type,
    "model_type": lambda message: message.model_type,
    "model_id": lambda message: message.subject,
    "namespace": lambda message: message.namespace,
    "key": lambda message: message.key,
}


class Template:
    """The destination of each message: a text with fields in braces.

    The fields are ``{event_type}``, ``{model_type}``, ``{model_id}``, ``{namespace}`` and ``{key}``. ``fit`` makes the
    value of a field fit for the broker's names, and ``fit_whole`` does so for a destination with such values. Raises
    :class:`ConfigurationError`, which names ``option``, for a text that is empty, has an unknown field, a conversion or
    a format, or braces that do not close.

    Example::

        subject = Template("wallets.{event_type}", option="subject")
        subject(message)  # "wallets.MoneyDeposited"
    """

    def __init__(
        self, text: str, *, option: str, fit: Callable[[str], str] = str, fit_whole: Callable[[str], str] = str
    ) -> None:
        self.text = text
        self._option = option
        self._fit = fit
        self._fit_whole = fit_whole
        self._parts = self._checked(text)
        self._constant = "".join(literal for literal, _ in self._parts) if self.is_constant else None
        self._by_type: dict[str, str] | None = {} if self.fields == {"event_type"} else None

    @property
    def fields(self) -> set[str]:
        """The names of the fields."""
        return {field for _, field in self._parts if field is not None}

    @property
    def is_constant(self) -> bool:
        """True if every message has the same destination."""
        return not self.fields

    def example(self) -> str:
        """The destination with ``x`` in each field, to see what the text around the fields makes."""
        return "".join(literal + ("x" if field is not None else "") for literal, field in self._parts)

    def __call__(self, message: Message) -> str:
        """The destination of a message; :class:`Unprocessable` if the message lacks the value of a field."""
        if self._constant is not None:
            return self._constant
        if self._by_type is None:
            return self._filled(message)
        # Types are few, except on a topic, where names are unlimited.
        known = self._by_type.get(message.type)
        if known is None:
            known = self._filled(message)
            if len(self._by_type) < _MOST_KNOWN:
                self._by_type[message.type] = known
        return known

    def _filled(self, message: Message) -> str:
        filled: list[str] = []
        for literal, field in self._parts:
            filled.append(literal)
            if field is not None:
                value = _FIELDS[field](message)
                if not value:
                    raise Unprocessable(
                        f"event {message.id} of type {message.type!r} has no {field}, which {self._option}="
                        f"{self.text!r} needs: emit the event with {_REMEDY.get(field, field)}=, or change the template"
                    )
                filled.append(self._fit(value))
        return self._fit_whole("".join(filled))

    def _checked(self, text: str) -> list[tuple[str, str | None]]:
        if not isinstance(text, str) or not text:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise ConfigurationError(
                f"{self._option} is {briefly(text)}; expected a text such as 'wallets.{{event_type}}'"
            )
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigurationError(f"{self._option}={text!r} cannot be read: {error}") from None
        for _, field, layout, conversion in parts:
            if field is not None and field not in _FIELDS:
                raise ConfigurationError(
                    f"{self._option}={text!r} has the field {field!r}: {instead_of(field, _FIELDS)}"
                )
            if layout or conversion:
                raise ConfigurationError(
                    f"{self._option}={text!r} has a format or a conversion in {field!r}; write {{{field}}}"
                )
        return [(literal, field) for literal, field, _, _ in parts]


_MOST_KNOWN = 1000
_REMEDY = {"model_type": "model_type", "model_id": "model_id", "key": "ordering_key"}
