"""The gate: everything that is known against a setup, before anyone pays for finding out."""

from __future__ import annotations

from terrazzo.planner.gate.engine_rules import ENGINE_RULES
from terrazzo.planner.gate.framework import Framework
from terrazzo.planner.gate.peer_rules import PEER_RULES
from terrazzo.planner.gate.rule import Finding
from terrazzo.planner.gate.rules import RULES
from terrazzo.planner.setup.setup import Setup

__all__ = ["ALL_RULES", "TERRAZZO", "findings", "runnable"]

ALL_RULES = RULES + ENGINE_RULES + PEER_RULES
TERRAZZO = Framework()


def findings(setup: Setup, framework: Framework = TERRAZZO) -> tuple[Finding, ...]:
    """What is known against a setup under a framework, by default Terrazzo: refusals first, then warnings."""
    found = [finding for rule in ALL_RULES if (finding := rule.finding(setup, framework)) is not None]
    return tuple(sorted(found, key=lambda finding: ("refuse", "planned", "warn").index(finding.severity)))


def runnable(setup: Setup) -> bool:
    """Whether nothing but warnings speaks against running a setup with this version of Terrazzo."""
    return all(finding.severity == "warn" for finding in findings(setup))
