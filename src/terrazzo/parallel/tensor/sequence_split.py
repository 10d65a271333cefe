"""Sequences that ranks along `tp` have in parts between matrices, from one module of a model to a later one.

The first of these modules takes this rank's part of its input, the last one gathers its output. Between them a module
is given, and returns, tensors of this rank's positions; other tensors that need gradients are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput, Misuse
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks
from terrazzo.parallel.tensor.arguments import first_activation, others_with_gradients, with_first_changed
from terrazzo.parallel.tensor.tensor_cuts import TensorCuts

__all__ = ["SequenceSplit", "split_between"]


@dataclass
class SequenceSplit:
    """The exchanges of one model's activations, which depend on whether its sequences are split at the moment.

    Hooks and forwards of the model's modules hold it; a copy of the model shares it. They give it the ranks, as these
    exchange in the module.

    Attributes:
        active: whether sequences are split, in modules that split them. False in a forward without gradients whose
            length does not divide, such as that of a text that is being generated.
    """

    active: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceSplit:
        return self

    def whole_input(self, ranks: TensorRanks, values: Tensor, splits: bool) -> Tensor:
        """The whole input of a module whose matrices are cut, `splits`: from this rank's part of each sequence."""
        return ranks.all_gather_sequence(values) if splits and self.active else ranks.copy(values)

    def summed_output(self, ranks: TensorRanks, values: Tensor, splits: bool) -> Tensor:
        """The sum of the ranks' `values`, `splits`: this rank's part of each sequence of it."""
        return ranks.reduce_scatter_sequence(values) if splits and self.active else ranks.all_reduce(values)

    def begin(self, ranks: TensorRanks, values: Tensor) -> Tensor:
        """This rank's part of each sequence, dim -2 of `values`.

        Raises:
            BadInput: the length does not divide, and gradients are enabled: those of weights need parts.
        """
        length, parts = values.shape[-2], ranks.size
        self.active = length % parts == 0
        if not self.active and torch.is_grad_enabled():
            raise BadInput(
                f"Sequences of {length} positions do not divide over tp {parts}: pad or cut them to a multiple of "
                f"{parts}, or keep them whole between matrices with tz.parallelize(..., sequence=False)."
            )
        return ranks.scatter_sequence(values) if self.active else values

    def end(self, ranks: TensorRanks, values: Tensor) -> Tensor:
        """Whole sequences again."""
        was_active, self.active = self.active, True
        return ranks.gather_sequence(values) if was_active else values


def split_between(cuts: TensorCuts, modules: Sequence[tuple[str, nn.Module]], split: SequenceSplit) -> None:
    """Have sequences split from the input of the first of these modules to the output of the last, with their names."""
    (first_name, first), (last_name, last) = modules[0], modules[-1]
    first.register_forward_pre_hook(_SplitInput(split, cuts.ranks_at(first_name), first_name), with_kwargs=True)
    for name, module in modules[1:]:
        module.register_forward_pre_hook(_CheckInput(name), with_kwargs=True)
    for name, module in modules[:-1]:
        module.register_forward_hook(_CheckOutput(name))
    last.register_forward_hook(_JoinOutput(split, cuts.ranks_at(last_name), last_name))


@dataclass
class _SplitInput:
    split: SequenceSplit
    ranks: TensorRanks
    name: str

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if others_with_gradients((args, kwargs), first_activation(args, kwargs)):
            raise _second_input(module, self.name)
        return with_first_changed(module, args, kwargs, lambda values: self.split.begin(self.ranks, values))


@dataclass
class _CheckInput:
    """Tensors of the shape of the first are parts as well."""

    name: str

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        first = first_activation(args, kwargs)
        if any(not _alike(each, first) for each in others_with_gradients((args, kwargs), first)):
            raise _second_input(module, self.name)


@dataclass
class _CheckOutput:
    """Tensors of the shape of the first are parts as well."""

    name: str

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        first = next((each for each in tree_leaves(output) if isinstance(each, Tensor)), None)
        if any(not _alike(each, first) for each in others_with_gradients(output, first)):
            raise _second_output(module, self.name)


@dataclass
class _JoinOutput:
    split: SequenceSplit
    ranks: TensorRanks
    name: str

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self.split.end(self.ranks, output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            if others_with_gradients(output[1:], None):
                raise _second_output(module, self.name)
            return (self.split.end(self.ranks, output[0]), *output[1:])
        raise Misuse(
            f"The last module whose sequences are split, a {type(module).__name__}, returns a "
            f"{type(output).__name__}, in which nothing says what the sequence is: return it alone, or first of a "
            "tuple; or pass sequence=False to tz.parallelize."
        )


def _alike(values: Tensor, first: Tensor | None) -> bool:
    return first is not None and values.shape == first.shape


def _second_input(module: nn.Module, name: str) -> Misuse:
    return Misuse(
        f"{name!r}, a {type(module).__name__} whose sequences are split, was given a second tensor that needs "
        "gradients, of which each rank would have those of its own positions alone. Pass sequence=False to "
        "tz.parallelize."
    )


def _second_output(module: nn.Module, name: str) -> Misuse:
    return Misuse(
        f"{name!r}, a {type(module).__name__} whose sequences are split, returns another tensor with gradients beside "
        "the sequence: it is of this rank's positions alone. Pass sequence=False to tz.parallelize, or detach it where "
        "it is for reading."
    )
