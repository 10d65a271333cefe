"""The gate: everything that is known against a setup, before anyone pays for finding out."""

from __future__ import annotations

from terrazzo.planner.gate.engine_rules import ENGINE_RULES
from terrazzo.planner.gate.framework import Framework
from terrazzo.planner.gate.peer_rules import PEER_RULES
from terrazzo.planner.gate.rule import Objection
from terrazzo.planner.gate.rules import RULES
from terrazzo.planner.setup.setup import Setup

__all__ = ["ALL_RULES", "TERRAZZO", "objections", "runnable"]

ALL_RULES = RULES + ENGINE_RULES + PEER_RULES
TERRAZZO = Framework()


def objections(setup: Setup, framework: Framework = TERRAZZO) -> tuple[Objection, ...]:
    """What is known against a setup under a framework, by default Terrazzo: refusals first, then warnings."""
    raised = [objection for rule in ALL_RULES if (objection := rule.objection(setup, framework)) is not None]
    return tuple(sorted(raised, key=lambda objection: ("refuse", "planned", "warn").index(objection.severity)))


def runnable(setup: Setup) -> bool:
    """Whether nothing but warnings speaks against running a setup with this version of Terrazzo."""
    return all(objection.severity == "warn" for objection in objections(setup))
