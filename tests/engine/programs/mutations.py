"""Defects planted in the engine, to show that random programs find such defects.

Each is small: it strikes one unit, one rank or one moment. A defect is planted through pytest's `monkeypatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from terrazzo.engine.buckets.gradients import gradient
from terrazzo.engine.buckets.gradients.finished import FinishedGradient
from terrazzo.engine.buckets.gradients.gradient import Gradient
from terrazzo.engine.buckets.weights.full import FullWeights
from terrazzo.engine.hooks.backward_hooks import BackwardHooks
from terrazzo.engine.model import gathered_blocks
from terrazzo.engine.optim import driver
from terrazzo.engine.plan.moves import Divisor, GradientFate
from terrazzo.engine.progress.denominator import Denominator
from terrazzo.engine.sharding import prepare

STRUCK = "tree.parts.0"
"""Defects of one unit are in whatever holds parameters of this name."""


def a_rank_is_left_out_of_a_sum(patch: pytest.MonkeyPatch) -> None:
    take = Gradient._take_unreduced

    def taken(self: Gradient, fate: GradientFate) -> tuple[torch.Tensor, bool]:
        elements, lent = take(self, fate)
        return elements.zero_() if _struck(self) and dist.get_rank() == 1 else elements, lent

    patch.setattr(Gradient, "_take_unreduced", taken)


def a_gather_is_stale(patch: pytest.MonkeyPatch) -> None:
    """Every second gather brings what the one before it brought."""
    gather = FullWeights.gather

    def gathered(self: Any, from_rest: bool = False) -> Any:
        full = yield from gather(self, from_rest)
        if _struck(self):
            before, self.before = getattr(self, "before", None), None if hasattr(self, "before") else full.clone()
            if before is not None:
                full.copy_(before)
        return full

    patch.setattr(FullWeights, "gather", gathered)


def the_denominator_is_wrong_by_a_percent(patch: pytest.MonkeyPatch) -> None:
    right = Denominator.divisor
    patch.setattr(Denominator, "divisor", lambda self: Divisor(1.01 * right(self).denominator, right(self).loss_scale))


def an_update_is_lost(patch: pytest.MonkeyPatch) -> None:
    """Of the last segment that an optimizer has on a rank, in every step."""
    before = driver.OptimizerDriver._before_step

    def step(self: Any, stepped: Any, args: Any, kwargs: Any) -> None:
        before(self, stepped, args, kwargs)
        if self.segments:
            self.segments[-1].parameter.grad = None

    patch.setattr(driver.OptimizerDriver, "_before_step", step)


def a_tied_weight_is_untied(patch: pytest.MonkeyPatch) -> None:
    partition = prepare.partition

    def untied(model: nn.Module, names: Sequence[str], *tied_ranks: Any) -> Any:
        seen = set()
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in seen:
                    setattr(module, name, nn.Parameter(parameter.detach().clone()))
                seen.add(parameter)
        return partition(model, names, *tied_ranks)

    patch.setattr(prepare, "partition", untied)


def an_earlier_micro_batch_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def added(self: Gradient, data: torch.Tensor) -> torch.Tensor:
        self._partial = None
        return data

    patch.setattr(Gradient, "_add_partial", added)


def clipping_misses_a_unit(patch: pytest.MonkeyPatch) -> None:
    scale = FinishedGradient.scale
    patch.setattr(FinishedGradient, "scale", lambda self, factor: None if _struck(self) else scale(self, factor))


def an_edit_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gathered_blocks, "take_over_gathered", lambda bucket: None)


def a_late_gradient_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """What comes after its unit's reduction has been started is never reduced."""
    take = BackwardHooks.accumulate_gradient

    def taken(self: Any, unit: int, number: int, index: int, parameter: torch.Tensor) -> None:
        if self.schedule.backward is not None and unit in self.schedule.backward.closed:
            parameter.grad = None
        take(self, unit, number, index, parameter)

    patch.setattr(BackwardHooks, "accumulate_gradient", taken)


def an_absent_gradient_is_stepped_on(patch: pytest.MonkeyPatch) -> None:
    """Parameters that no rank ran are updated with a gradient of zero."""
    take = gradient.Gradient._take_unreduced

    def taken(self: Gradient, fate: GradientFate) -> tuple[torch.Tensor, bool]:
        self.seen = [True] * len(self.seen)
        return take(self, fate)

    patch.setattr(gradient.Gradient, "_take_unreduced", taken)


def _struck(owner: Any) -> bool:
    return any(slot.name.startswith(STRUCK) for slot in owner.space.layout.slots)


Mutation = Callable[[pytest.MonkeyPatch], None]

MUTATIONS: dict[Mutation, int] = {
    a_rank_is_left_out_of_a_sum: 0,
    a_gather_is_stale: 17,
    the_denominator_is_wrong_by_a_percent: 0,
    an_update_is_lost: 0,
    a_tied_weight_is_untied: 3,
    an_earlier_micro_batch_is_forgotten: 1,
    clipping_misses_a_unit: 1,
    an_edit_is_lost: 94,
    a_late_gradient_is_dropped: 53,
    an_absent_gradient_is_stepped_on: 3,
}
"""And the first seed that finds each, to save time; any other would do that comes soon."""
