"""Compares the inputs of ranks along `tp`, and the random numbers that they draw, in the first training forward.

The ranks' parts of an output are added up. If ranks saw different data, the sum would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from terrazzo.errors import RanksApart
from terrazzo.parallel.input_fingerprints import DRAWN_BY_DATA_RANK, fingerprint_of, inputs_as_text
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks
from terrazzo.parallel.tensor.dropout import APART_STATES, random_states, watch_seeds

__all__ = ["watch_alike"]


def watch_alike(model: nn.Module, ranks: TensorRanks, drops: bool) -> None:
    """Compare what ranks are given as the first training forward begins, and random states if it draws numbers.

    Of a model that `drops`, as modules of it show, states are compared as each training forward begins. A forward
    raises `RanksApart` where they differ, on every rank.
    """
    if drops:
        watch_seeds(model, ranks)
    first = _FirstForward(ranks, watches_states=not drops)
    model.register_forward_pre_hook(first.begin, with_kwargs=True)
    model.register_forward_hook(first.end)


@dataclass
class _FirstForward:
    """The first one in training.

    Attributes:
        watches_states: random states are to be compared, if it draws numbers.
        begun: which states it has begun with; None while it does not run.
        is_over: it has been, and nothing is compared any more.
    """

    ranks: TensorRanks
    watches_states: bool
    begun: int | None = None
    is_over: bool = False

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.begun = None
        if torch.compiler.is_compiling() or self.is_over or not (model.training and torch.is_grad_enabled()):
            return
        inputs = [args, dict(kwargs)]
        if not self.ranks.agree_on(fingerprint_of(inputs)):
            raise RanksApart(
                f"The ranks along tp were given other inputs (here {inputs_as_text(inputs)}), and have parts of the "
                f"same matrices: give all of them the same batches, {DRAWN_BY_DATA_RANK}"
            )
        self.begun = random_states()

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.begun is None:
            return
        self.is_over, drawn = True, self.begun != random_states()
        if self.watches_states and not self.ranks.agree_on(self.begun if drawn else 0):
            raise RanksApart(APART_STATES)
