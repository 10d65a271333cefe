"""What a rule is: a combination that is known to be bad in some framework, with the reason and what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from terrazzo.planner.gate.framework import Framework
from terrazzo.planner.machine.network import Network, group_of
from terrazzo.planner.memory.stages import stage_units
from terrazzo.planner.memory.tiers import host_writes
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.bubble import idle_share
from terrazzo.planner.traffic.exchanges import model_parallel_moves

__all__ = ["Finding", "Rule", "in_shares", "on_disk", "tiers", "zero_stage"]

Severity = Literal["refuse", "planned", "warn"]
"""`refuse`: it fails, or trains something else. `planned`: sound, but this version of Terrazzo cannot run it yet.
`warn`: it runs, and is slower, larger or less exact than it looks."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a combination, and what to do instead."""

    rule: str
    severity: Severity
    reason: str
    alternative: str
    source: str

    def __str__(self) -> str:
        return f"{self.reason} {self.alternative}"


@dataclass(frozen=True)
class Rule:
    """One known-bad combination.

    Attributes:
        name: unique.
        scope: frameworks it is about; empty for all.
        applies: whether a setup in one of them is such a combination.
        reason, alternative: sentences, with fields of `facts` in braces.
        source: where it is said or can be seen.
    """

    name: str
    scope: tuple[str, ...]
    severity: Severity
    applies: Callable[[Setup, Framework], bool]
    reason: str
    alternative: str
    source: str

    def finding(self, setup: Setup, framework: Framework) -> Finding | None:
        """What the rule says of a setup, or None where it does not apply."""
        if (self.scope and framework.name not in self.scope) or not self.applies(setup, framework):
            return None
        known = facts(setup)
        return Finding(
            self.name, self.severity, self.reason.format(**known), self.alternative.format(**known), self.source
        )


def zero_stage(setup: Setup) -> int:
    """The ZeRO stage whose states a plan splits: 0 to 3."""
    plan = setup.plan
    return 3 if plan.weight.axes else 2 if plan.grad.axes else 1 if plan.optim.axes else 0


def tiers(setup: Setup) -> dict[str, str]:
    """State → tier of what is not on the device, as the plan writes it: `cpu`, or `cpu:0.7` of a share of the units."""
    return {state: place.tier for state, place in setup.plan.places().items() if place.offloaded}


def on_disk(setup: Setup, *states: str) -> bool:
    """Whether any part of these states, by default of all, is on a disk."""
    return any("nvme" in tier for state, tier in tiers(setup).items() if not states or state in states)


def in_shares(setup: Setup) -> bool:
    """Whether a state is on one tier for some units and on another for others."""
    return any(len(place.shares) > 1 for place in setup.plan.places().values())


def _exchanges(setup: Setup) -> str:
    """How long a step waits for tensor parallelism, where the links are known, in words."""
    network, group = Network(setup.cluster.device), group_of(setup.mesh, "tp")
    if setup.mesh.tp == 1 or network.bandwidth(group) is None:
        return "for an unknown time"
    moves = [(move, count) for unit, count in stage_units(setup, 0) for move in model_parallel_moves(setup, unit)]
    once = sum(count * network.move_s(move) for move, count in moves if move.purpose == "tensor")
    return f"about {once * setup.micro_batches:.2g} s"


def facts(setup: Setup) -> dict[str, object]:
    """What reasons may name."""
    mesh, model, device = setup.mesh, setup.model, setup.cluster.device
    written = host_writes(setup)
    return {
        "plan": setup.plan.name,
        "stage": zero_stage(setup),
        "device": device.name,
        "domain": device.per_node if device.kind == "cpu" else device.scaleup_domain,
        "exchanges": _exchanges(setup),
        "model": model.name,
        "vocab": model.vocab,
        "padded": -(-model.vocab // mesh.tp) * mesh.tp,
        "layers": model.layers,
        "positions": model.positions,
        "sequence": setup.sequence,
        "optimizer": setup.optimizer.name,
        "matmul": setup.matmul,
        "m": setup.micro_batches,
        "shard": mesh.shard_ranks,
        "group": mesh.shard_ranks * mesh.tp,
        "bubble": f"{idle_share(setup):.0%}",
        "offloaded": ", ".join(f"{state} on {tier}" for state, tier in tiers(setup).items()),
        "grad_tier": setup.plan.grad.tier,
        "units": sum(count for _, count in stage_units(setup, 0)),
        "written": f"{written / 1e12:.3g} TB" if written >= 1e10 else f"{written / 1e9:.3g} GB",
        "steps": f"{600e12 / max(written, 1):,.0f}",
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "ep": mesh.ep,
    }
