"""What a rule is: a combination that is known to be bad in some framework, with the reason and what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from terrazzo.planner.gate.facts import Facts
from terrazzo.planner.setup.setup import Setup

__all__ = ["PlanFinding", "Rule", "Sentence", "as_text"]

Severity = Literal["refuse", "planned", "warn"]
"""`refuse`: it fails, or trains something else. `planned`: sound, but this version of Terrazzo cannot run it yet.
`warn`: it runs, and is slower, larger or less exact than it looks."""

Sentence = str | Callable[[Facts], str]
"""A sentence as it is, or one that is made from what it names of a setup."""


def as_text(sentence: Sentence, facts: Facts) -> str:
    """The text of a sentence about a setup."""
    return sentence if isinstance(sentence, str) else sentence(facts)


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
        reason, alternative: what is wrong, and what to do instead.
        source: where it is said or can be seen.
    """

    name: str
    scope: tuple[str, ...]
    severity: Severity
    applies: Callable[[Setup], bool]
    reason: Sentence
    alternative: Sentence
    source: str

    def finding(self, setup: Setup) -> PlanFinding | None:
        """What the rule says of a setup in its framework, or None where it does not apply."""
        if (self.scope and setup.framework.name not in self.scope) or not self.applies(setup):
            return None
        facts = Facts(setup)
        return PlanFinding(
            self.name, self.severity, as_text(self.reason, facts), as_text(self.alternative, facts), self.source
        )
