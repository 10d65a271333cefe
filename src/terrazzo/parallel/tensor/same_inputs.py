"""Compares the inputs of ranks along `tp`, and the random numbers that they draw.

The ranks' parts of an output are added up. If ranks saw different data, the sum would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from terrazzo.engine import inside_backward
from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import RanksApart
from terrazzo.parallel.input_fingerprints import DRAWN_BY_DATA_RANK, compares_values, fingerprint_of, inputs_as_text
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks
from terrazzo.parallel.tensor.dropout import random_states
from terrazzo.parallel.tensor.first_forwards import ForwardWatch

__all__ = ["SameDraws", "SameInputs", "SameRandomStates"]


@dataclass
class SameInputs:
    """A hook before each forward of a model, which raises `RanksApart` on every rank where inputs differ.

    Attributes:
        compared: the kinds of forwards whose inputs have been compared: in training or not, with gradients or without.
    """

    ranks: TensorRanks
    compared: set[tuple[bool, bool]] = field(default_factory=set)

    def __call__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or inside_backward():
            return
        kind, first = (model.training, torch.is_grad_enabled()), next(model.parameters(), None)
        if not compares_values(HOST if first is None else first.device, kind in self.compared):
            return
        inputs = [args, dict(kwargs)]
        if not self.ranks.agree_on(fingerprint_of(inputs)):
            raise RanksApart(
                f"The ranks along tp were given other inputs (here {inputs_as_text(inputs)}), and have parts of the "
                f"same matrices: give all of them the same batches, {DRAWN_BY_DATA_RANK}"
            )
        self.compared.add(kind)


@dataclass(frozen=True)
class SameDraws:
    """Builds a watch of a training forward, which raises `RanksApart` on every rank where it draws other numbers."""

    ranks: TensorRanks

    def __call__(self, model: nn.Module) -> ForwardWatch | None:
        return _Draws(self.ranks) if model.training and torch.is_grad_enabled() else None


@dataclass
class _Draws(ForwardWatch):
    """One forward.

    Attributes:
        begun: random states with which it has begun.
    """

    ranks: TensorRanks
    begun: int = 0

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.begun = random_states()

    def succeed(self, output: Any) -> None:
        is_drawn = self.begun != random_states()
        if not self.ranks.agree_on(self.begun if is_drawn else 0):
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
