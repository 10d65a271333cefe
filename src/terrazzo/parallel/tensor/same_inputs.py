"""Compares the inputs of ranks along `tp`, and the random numbers that they draw.

The ranks' parts of an output are added up. If ranks saw different data, the sum would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from terrazzo.errors import RanksApart
from terrazzo.parallel.input_fingerprints import DRAWN_BY_DATA_RANK, fingerprint_of, inputs_as_text
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks
from terrazzo.parallel.tensor.dropout import random_states
from terrazzo.parallel.tensor.first_forwards import ForwardWatch

__all__ = ["SameInputs", "SameRandomStates"]


@dataclass(frozen=True)
class SameInputs:
    """Builds a watch of a forward, which raises `RanksApart` on every rank where inputs differ.

    Attributes:
        compares_states: random states are compared too, if a training forward draws numbers.
    """

    ranks: TensorRanks
    compares_states: bool

    def __call__(self, model: nn.Module) -> ForwardWatch:
        trains = model.training and torch.is_grad_enabled()
        return _Inputs(self.ranks, self.compares_states and trains)


@dataclass
class _Inputs(ForwardWatch):
    """One forward.

    Attributes:
        begun: random states with which it has begun.
    """

    ranks: TensorRanks
    compares_states: bool
    begun: int = 0

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        inputs = [args, dict(kwargs)]
        if not self.ranks.agree_on(fingerprint_of(inputs)):
            raise RanksApart(
                f"The ranks along tp were given other inputs (here {inputs_as_text(inputs)}), and have parts of the "
                f"same matrices: give all of them the same batches, {DRAWN_BY_DATA_RANK}"
            )
        self.begun = random_states()

    def succeed(self) -> None:
        is_drawn = self.begun != random_states()
        if self.compares_states and not self.ranks.agree_on(self.begun if is_drawn else 0):
            raise RanksApart(_APART_STATES)


@dataclass
class SameRandomStates:
    """A hook before each forward of a model that drops something: it compares random states, of host and device.

    A training forward raises `RanksApart` on every rank where they differ.
    """

    ranks: TensorRanks

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled() and not self.ranks.agree_on(random_states()):
            raise RanksApart(_APART_STATES)


_APART_STATES = (
    "The ranks along tp have other random states, and would drop other activations of those that all of them have: "
    "seed ranks that see the same data alike, as by torch.manual_seed(seed + data rank), where the data rank is "
    "mesh.get_local_rank('dp_shard')."
)
