"""Every formula that a term can have, by its key: they stand beside the code that computes them."""

from __future__ import annotations

from collections.abc import Mapping

from terrazzo.planner.figures import Formula
from terrazzo.planner.memory import activations, logits, overheads, peak, replay, states, tiers
from terrazzo.planner.timing import (
    attention,
    compute,
    core_turns,
    measured,
    overlap,
    pipeline_rank,
    pipeline_step,
    products,
    rank_update,
    update,
)
from terrazzo.planner.traffic import exchanges, outer_moves, volumes

__all__ = ["FORMULAS"]

_MODULES = (
    *(states, activations, logits, peak, tiers, overheads, replay),
    *(exchanges, outer_moves, volumes),
    *(products, attention, compute, overlap, update, pipeline_rank, rank_update, pipeline_step, core_turns, measured),
)

FORMULAS: Mapping[str, Formula] = {key: formula for each in _MODULES for key, formula in each.FORMULAS.items()}
