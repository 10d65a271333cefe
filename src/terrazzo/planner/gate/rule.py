"""What a rule is: a combination that is known to be bad in some framework, with the reason and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from terrazzo.planner.gate.facts import Facts
from terrazzo.planner.setup.setup import Setup

__all__ = ["PlanFinding", "Rule", "RuleBook", "as_text"]

Severity = Literal["refuse", "planned", "warn"]
"""`refuse`: it fails, or trains something else. `planned`: sound, but this version of Terrazzo cannot run it yet.
`warn`: it runs, and is slower, larger or less exact than it looks."""

Applies = Callable[[Setup], bool]


def as_text(sentence: str, facts: Facts) -> str:
    """A sentence about a setup, in which names in braces are attributes of `Facts`: `{plan}`, or `{split.size}`."""
    return re.sub(r"\{([\w.]+)\}", lambda match: str(attrgetter(match[1])(facts)), sentence)


@dataclass(frozen=True)
class PlanFinding:
    """What is wrong with a combination, and what to do instead."""

    rule: str
    severity: Severity
    reason: str
    alternative: str
    source: str

    def __str__(self) -> str:
        return f"{self.reason} {self.alternative}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One known-bad combination.

    Attributes:
        name: unique.
        scope: frameworks it is about; empty for all.
        applies: whether a setup, in one of them, is such a combination.
        reason, alternative: what is wrong, and what to do instead, as `as_text` takes them.
        source: where it is said or can be seen.
    """

    name: str
    scope: tuple[str, ...]
    severity: Severity
    applies: Applies
    reason: str
    alternative: str
    source: str

    def finding(self, setup: Setup) -> PlanFinding | None:
        """What the rule says of a setup in its framework, or None where it does not apply."""
        if (self.scope and setup.framework.name not in self.scope) or not self.applies(setup):
            return None
        facts = Facts(setup)
        return PlanFinding(
            self.name, self.severity, as_text(self.reason, facts), as_text(self.alternative, facts), self.source
        )


class RuleBook:
    """Collects the rules about some frameworks, or about all: each is a function of a setup, decorated with the rest.

    Attributes:
        rules: in the order in which they were written.
    """

    def __init__(self, *scope: str) -> None:
        self._scope = scope
        self.rules: list[Rule] = []

    def refuses(self, name: str, *, reason: str, alternative: str, source: str) -> Callable[[Applies], Applies]:
        """Decorates what says whether a setup is such a combination; arguments as of `Rule`."""
        return self._rule("refuse", name, reason, alternative, source)

    def plans(self, name: str, *, reason: str, alternative: str, source: str) -> Callable[[Applies], Applies]:
        """As `refuses`, for what is sound and not run yet."""
        return self._rule("planned", name, reason, alternative, source)

    def warns(self, name: str, *, reason: str, alternative: str, source: str) -> Callable[[Applies], Applies]:
        """As `refuses`, for what runs."""
        return self._rule("warn", name, reason, alternative, source)

    def _rule(
        self, severity: Severity, name: str, reason: str, alternative: str, source: str
    ) -> Callable[[Applies], Applies]:
        def add(applies: Applies) -> Applies:
            self.rules.append(
                Rule(
                    name=name,
                    scope=self._scope,
                    severity=severity,
                    applies=applies,
                    reason=reason,
                    alternative=alternative,
                    source=source,
                )
            )
            return applies

        return add
