"""The rule engine, which applies rules to facts. The rules themselves are in ``rules.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from shlex import quote
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from outboxio.health.facts import Facts
from outboxio.health.values import Finding, Level


class Problem(NamedTuple):
    """A fault that a rule has found."""

    text: str
    handler: str | None = None
    job: str | None = None
    fix: str = ""
    """A more specific command than the rule's."""
    since: datetime | None = None
    """When the problem began. It is reported once it has lasted longer than ``after``."""
    after: timedelta | None = None
    """Overrides the rule's ``after``."""


class Rule(Struct, frozen=True, kw_only=True):
    """A condition, the severity of its problems, and a command that fixes them or shows more about them."""

    name: str
    find: Callable[[Any], Iterator[Problem]]
    of_process: bool = False
    """True for a rule about :class:`ProcessFacts`, as used by ``outbox.health()``; others are about a shard."""
    level: Level = "degraded"
    """A problem of a shard has the level ``down`` only if all shards are down."""
    fix: str = ""
    """A command, in which ``{handler}`` and ``{job}`` are replaced by the problem's names."""
    see: tuple[str, str] | None = None
    """The dashboard page about the problems, and the text of the link."""
    after: timedelta = timedelta()
    """The minimum duration of a problem that has ``since``."""
    unless: Sequence[str] = ()
    """Earlier rules that report the same fault."""

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """Yield the problems that have lasted long enough."""
        if self.of_process:
            if facts.process is not None:
                yield from map(self._finding, self.find(facts.process))
            return
        for shard in facts.shards:
            for problem in self.find(shard):
                after = self.after if problem.after is None else problem.after
                if problem.since is None or shard.age(problem.since) > after.total_seconds():
                    yield replace(self._finding(problem), shard=shard.name)

    def _finding(self, problem: Problem) -> Finding:
        names = {"handler": quote(problem.handler or ""), "job": quote(problem.job or "")}
        return Finding(
            rule=self.name, level=self.level, text=problem.text, fix=problem.fix or self.fix.format(**names),
            handler=problem.handler, job=problem.job, since=problem.since,
        )  # fmt: skip


_Find = TypeVar("_Find", bound=Callable[[Any], Iterator[Problem]])


class Rules(list[Rule]):
    """A list of rules, most severe first."""

    def add(self, fix: str = "", **options: Any) -> Callable[[_Find], _Find]:
        """Register a function as a rule under its own name. See :class:`Rule` for the options."""

        def decorate(find: _Find) -> _Find:
            self.append(Rule(name=find.__name__, find=find, fix=fix, **options))
            return find

        return decorate

    def apply(self, facts: Facts) -> list[Finding]:
        """Return the findings, worst first. Unless all shards are down, a fault of one of several is ``degraded``."""
        found: list[Finding] = []
        for rule in self:
            if not any(one.rule in rule.unless for one in found):
                found += rule.findings(facts)
        if len(facts.shards) == 1:
            return found
        down = {one.shard for one in found if one.level == "down" and one.shard is not None}
        is_down = len(down) == len(facts.shards)
        return [one if one.shard is None else _placed(one, is_down=is_down) for one in found]


def worst(findings: Sequence[Finding]) -> Level:
    """Return the worst level; ``ok`` if there are no findings."""
    return findings[0].level if findings else "ok"


def _placed(finding: Finding, *, is_down: bool) -> Finding:
    """Return the finding of one of several shards, with the shard in its text."""
    names = f"`{finding.shard}`", repr(finding.shard)
    text = finding.text
    if not any(name in text for name in names):
        text = f"{text.rstrip('.')} (shard `{finding.shard}`)."
    return replace(finding, text=text, level=finding.level if is_down else "degraded")
