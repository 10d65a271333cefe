"""The gate: everything that is known against a setup, before anyone pays for finding out."""

from __future__ import annotations

from dataclasses import replace

from terrazzo.planner.gate.deepspeed_rules import DEEPSPEED_RULES
from terrazzo.planner.gate.engine_rules import ENGINE_RULES
from terrazzo.planner.gate.general_rules import GENERAL_RULES
from terrazzo.planner.gate.peer_rules import PEER_RULES
from terrazzo.planner.gate.rule import PlanFinding
from terrazzo.planner.gate.train_rules import TRAIN_RULES
from terrazzo.planner.setup.framework import TERRAZZO
from terrazzo.planner.setup.setup import Setup

__all__ = ["ALL_RULES", "findings", "runnable"]

ALL_RULES = (*GENERAL_RULES, *ENGINE_RULES, *TRAIN_RULES, *DEEPSPEED_RULES, *PEER_RULES)


def findings(setup: Setup) -> tuple[PlanFinding, ...]:
    """What is known against a setup in the framework that runs it: refusals first, then warnings."""
    raised = [finding for rule in ALL_RULES if (finding := rule.finding(setup)) is not None]
    return tuple(sorted(raised, key=lambda finding: ("refuse", "planned", "warn").index(finding.severity)))


def runnable(setup: Setup) -> bool:
    """Whether nothing but warnings speaks against running a setup with this version of Terrazzo."""
    here = setup if setup.framework.name == TERRAZZO.name else replace(setup, framework=TERRAZZO)
    return all(finding.severity == "warn" for finding in findings(here))
