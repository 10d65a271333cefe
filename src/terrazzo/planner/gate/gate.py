"""The gate: everything that is known against a setup, before anyone pays for finding out."""

from __future__ import annotations

from dataclasses import replace

from terrazzo.planner.gate.engine_rules import ENGINE_RULES
from terrazzo.planner.gate.peer_rules import PEER_RULES
from terrazzo.planner.gate.rule import Objection
from terrazzo.planner.gate.rules import RULES
from terrazzo.planner.setup.framework import TERRAZZO
from terrazzo.planner.setup.setup import Setup

__all__ = ["ALL_RULES", "objections", "runnable"]

ALL_RULES = RULES + ENGINE_RULES + PEER_RULES


def objections(setup: Setup) -> tuple[Objection, ...]:
    """What is known against a setup in the framework that runs it: refusals first, then warnings."""
    raised = [objection for rule in ALL_RULES if (objection := rule.objection(setup)) is not None]
    return tuple(sorted(raised, key=lambda objection: ("refuse", "planned", "warn").index(objection.severity)))


def runnable(setup: Setup) -> bool:
    """Whether nothing but warnings speaks against running a setup with this version of Terrazzo."""
    here = setup if setup.framework.name == TERRAZZO.name else replace(setup, framework=TERRAZZO)
    return all(objection.severity == "warn" for objection in objections(here))
