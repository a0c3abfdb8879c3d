"""Finds statements that end a transaction in a string of SQL, before the string is sent.

A string may contain several statements, and COMMIT within a literal, a quoted name or a comment does not end a
transaction. So each dialect describes the text that can hide a semicolon. The patterns are unambiguous, so that strings
of any length are matched in linear time. Nearly all strings are a single statement, whose first keyword is enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Only statements that end or replace the transaction. Savepoints and ROLLBACK TO are allowed.
_ENDINGS = r"COMMIT|BEGIN|START\s+TRANSACTION|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b)"
_FURTHER_ENDINGS = r"END|ABORT|PREPARE\s+TRANSACTION"
_ALL_ENDINGS = re.compile(rf"({_ENDINGS}|{_FURTHER_ENDINGS})\b", re.IGNORECASE)

# The first keyword of a string if it ends a transaction, or a character that may precede such a keyword.
_START = re.compile(rf"\s*+(?:({_ENDINGS}|{_FURTHER_ENDINGS})\b|[-/#;])", re.IGNORECASE)

_COMMENT_BORDER = re.compile(r"/\*|\*/")


def first_ending(sql: str) -> str | None:
    """Return the keywords with which a single statement ends its transaction, or ``None``. Comments are skipped."""
    found = _START.match(sql)
    if found is not None and found[1] is None:
        blank = _BLANK.match(sql)
        found = _ALL_ENDINGS.match(sql, blank.end() if blank is not None else 0)
    return None if found is None else str(found[1])


class Lexicon:
    """The lexical rules of a dialect for strings of several statements."""

    def __init__(self, hiding: str, blank: str, *, endings: str, nests_comments: bool = False, body: str = "") -> None:
        """The parameters are regular expressions.

        - ``hiding``: text in which a semicolon does not end a statement.
        - ``blank``: text that may precede a statement.
        - ``endings``: the first keywords of statements that end the transaction.
        - ``body``: the first keywords of a statement that contains further statements, from BEGIN ATOMIC to END.
        """
        keywords = (
            r"|\b(?P<atomic>BEGIN\s+ATOMIC)\b|(?<![\w$.])(?P<case>CASE)\b|(?<![\w$.])(?P<end>END)\b" if body else ""
        )
        comment = r"|(?P<comment>/\*)" if nests_comments else ""
        self._token = re.compile(rf"(?P<semicolon>;){comment}|{hiding}{keywords}", re.IGNORECASE | re.DOTALL)
        self._blank = re.compile(rf"(?:\s|{blank})*+", re.DOTALL)
        self._endings = re.compile(rf"({endings})\b", re.IGNORECASE)
        self._any_ending = re.compile(rf"\b(?:{endings}|{_FURTHER_ENDINGS})\b", re.IGNORECASE)
        self._body = re.compile(body, re.IGNORECASE) if body else None
        self._nests_comments = nests_comments

    def ending_in(self, sql: str, *, has_run: bool = False) -> str | None:
        """Return the keywords of the first statement in ``sql`` that ends the transaction, or ``None``.

        ``has_run``: True if the transaction has already run a statement, so that the first statement could end it.
        """
        found = _START.match(sql)
        if found is None:
            semicolon = sql.find(";")
            if semicolon < 0 or not sql[semicolon + 1 :].strip() or not self._any_ending.search(sql, semicolon):
                return None
        elif found[1]:
            return str(found[1])
        return self._ending_of_any(sql, has_run=has_run) if self._any_ending.search(sql) else None

    def _ending_of_any(self, sql: str, *, has_run: bool) -> str | None:
        for index, start in enumerate(self.starts(sql)):
            found = self._endings.match(sql, start) if index or has_run else None
            found = found or (_ALL_ENDINGS.match(sql, start) if not index else None)
            if found is not None:
                return str(found[1])
        return None

    def starts(self, sql: str) -> Iterator[int]:
        """Yield the positions at which statements start."""
        position = self._after_blank(sql, 0)
        yield position
        has_body, depth = self._has_body(sql, position), 0
        while (found := self._token.search(sql, position)) is not None:
            position, kind = found.end(), found.lastgroup
            if kind == "comment":
                position = _end_of_comment(sql, found.start())
            elif kind == "semicolon" and not depth:
                position = self._after_blank(sql, position)
                yield position
                has_body = self._has_body(sql, position)
            elif has_body:
                depth += (kind == "atomic") + (kind == "case" and depth > 0) - (kind == "end" and depth > 0)

    def _after_blank(self, sql: str, position: int) -> int:
        found = self._blank.match(sql, position)
        position = found.end() if found is not None else position
        while self._nests_comments and sql.startswith("/*", position):
            found = self._blank.match(sql, _end_of_comment(sql, position))
            position = found.end() if found is not None else len(sql)
        return position

    def _has_body(self, sql: str, position: int) -> bool:
        return self._body is not None and self._body.match(sql, position) is not None


def _end_of_comment(sql: str, start: int) -> int:
    """Return the end of a comment that may contain nested comments."""
    depth = 0
    for border in _COMMENT_BORDER.finditer(sql, start):
        depth += 1 if border[0] == "/*" else -1
        if not depth:
            return border.end()
    return len(sql)


# Unterminated text hides the rest of the string, which the server rejects anyway.
_COMMENT = r"/\*.*?(?:\*/|\Z)"
_DOUBLED = r"'[^']*+(?:'|\Z)"  # a doubled quote counts as two adjacent literals
_ESCAPED = r"'(?:[^'\\]|\\.)*+(?:'|\Z)"
_NAME = r'"[^"]*+(?:"|\Z)'
_ESCAPED_NAME = r'"(?:[^"\\]|\\.)*+(?:"|\Z)'
_BACKTICKS = r"`[^`]*+(?:`|\Z)"
_LINE = r"--[^\n]*"

_BLANK = re.compile(rf"(?:\s|;|{_LINE}|{_COMMENT})*+", re.DOTALL)


def _postgres(text: str) -> Lexicon:
    # Backslashes escape after E, even if the literal continues on the next line.
    escaped = r"(?<![\w$])E'(?:[^'\\]|\\.|''|'[ \t\r\f]*\n\s*')*+(?:'|\Z)"
    dollars = r"(?<![\w$])\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?(?:\$(?P=tag)\$|\Z)"
    return Lexicon(
        rf"{_LINE}|{escaped}|{text}|{_NAME}|{dollars}",
        _LINE,
        endings=f"{_ENDINGS}|{_FURTHER_ENDINGS}",
        nests_comments=True,
        body=r"CREATE\s+(?:OR\s+REPLACE\s+)?(?:FUNCTION|PROCEDURE)\b",
    )


def _mysql(text: str) -> Lexicon:
    # Two dashes must be followed by whitespace. The server executes comments that start with an exclamation mark.
    comments = r"--(?=\s|\Z)[^\n]*|#[^\n]*|/\*(?!M?!).*?(?:\*/|\Z)"
    return Lexicon(
        rf"{comments}|{text}|{_ESCAPED_NAME}|{_BACKTICKS}",
        rf"{comments}|/\*M?!\d*|\*/",
        endings=f"{_ENDINGS}|{IMPLICIT_COMMITS}",
    )


IMPLICIT_COMMITS = (
    r"(?:ALTER|CREATE|DROP)\s+(?!TEMPORARY\b)\w+|RENAME\s+\w+|TRUNCATE|GRANT|REVOKE|LOCK\s+\w+|UNLOCK\s+\w+|FLUSH|"
    r"ANALYZE\s+\w+|OPTIMIZE\s+\w+|REPAIR\s+\w+|CHECK\s+TABLE|SET\s+PASSWORD|SET\s+(?:@@|SESSION\s+)?AUTOCOMMIT"
)
"""Statements that commit the transaction implicitly on MySQL and MariaDB."""

POSTGRES = _postgres(_DOUBLED)
POSTGRES_ESCAPING = _postgres(_ESCAPED)
"""With ``standard_conforming_strings`` off."""
MYSQL = _mysql(_ESCAPED)
MYSQL_NOT_ESCAPING = _mysql(_DOUBLED)
"""With the mode ``NO_BACKSLASH_ESCAPES``."""
