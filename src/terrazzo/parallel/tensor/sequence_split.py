"""Sequences that ranks along `tp` have in parts between matrices, from one block of a model to a later one.

The first block of a run takes this rank's part of its input, the last one gathers its output. Between them a block is
given, and returns, tensors of this rank's positions; other shapes, and other tensors that need gradients, are refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine import inside_backward
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput, Misuse
from terrazzo.parallel.exchanges import Move
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks
from terrazzo.parallel.tensor.arguments import first_activation, others_with_gradients, with_first_changed
from terrazzo.parallel.tensor.tensor_cuts import TensorCuts

__all__ = ["ModuleExchanges", "SequenceRun", "split_between"]

Dims = tuple[int, ...]

_WHOLE = "or keep sequences whole with tz.parallelize(..., sequence=False)"


@dataclass(eq=False)
class SequenceRun:
    """What is known, in a forward, of the sequences of one run of blocks.

    Hooks and forwards of the model's modules hold it; a copy of the model shares it. They give it the ranks, as these
    exchange in the module.

    Attributes:
        blocks: names of the blocks, in order.
        size: ranks along `tp`.
        active: whether sequences are split. False in a forward without gradients whose length does not divide, such as
            that of a text that is being generated.
        whole: all dims but the channels, `[..., T]`, of what the first block was given; None outside of the run.
        block: the one that runs.
        recomputed: by the number of tokens, the `whole` of forwards that backward may run again: in part, and after
            others.
    """

    blocks: Sequence[str]
    size: int
    active: bool = True
    whole: Dims | None = None
    block: str | None = None

    def __post_init__(self) -> None:
        self.recomputed: dict[int, set[Dims]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceRun:
        return self

    @property
    def part(self) -> Dims | None:
        """As `whole`, of this rank's part."""
        return None if self.whole is None else (*self.whole[:-1], self.whole[-1] // self.size)

    def begin(self, ranks: TensorRanks, values: Tensor) -> Tensor:
        """This rank's part of each sequence, dim -2 of `values`.

        Raises:
            BadInput: the length does not divide, and gradients are enabled: those of weights need parts.
        """
        length, parts = values.shape[-2], ranks.size
        self.active, self.whole = length % parts == 0, tuple(values.shape[:-1])
        if not self.active and torch.is_grad_enabled():
            raise BadInput(
                f"Sequences of {length} positions do not divide over tp {parts}: pad or cut them to a multiple of "
                f"{parts}, or keep them whole between matrices with tz.parallelize(..., sequence=False)."
            )
        if torch.is_grad_enabled():
            self.recomputed.setdefault(math.prod(self.whole), set()).add(self.whole)
        return ranks.scatter_sequence(values) if self.active else values

    def end(self, ranks: TensorRanks, values: Tensor) -> Tensor:
        """Whole sequences again."""
        was_active, part = self.active, self.part
        self.active, self.whole = True, None
        if not was_active:
            return values
        dims = tuple(values.shape[:-1])
        if part is not None and not (len(dims) >= len(part) and dims[-1] == part[-1]):
            raise _other_shape(self.blocks[-1], "returns", dims, part)
        return ranks.gather_sequence(values)

    def check_input(self, name: str, values: Tensor | None) -> None:
        """Refuse what is no part of the sequences that the first block was given.

        Raises:
            Misuse: there.
        """
        if inside_backward():  # which may run a part of the run again
            return
        if self.whole is None:
            raise self._outside(name)
        expected = self.part if self.active else self.whole
        if values is not None and values.shape[:-1] != expected:
            raise _other_shape(name, "was given", tuple(values.shape[:-1]), expected or ())

    def sequences(self, name: str, dims: Dims, parts: int) -> Dims:
        """All dims but the channels, with the sequences apart, of a tensor in which they may be one with others.

        Args:
            name: of a module in a block, for errors.
            dims: of its tensor.
            parts: into how many the sequences there are split: `size`, or 1.

        Raises:
            Misuse: the tensor has other tokens than the sequences of the run, or it is not known which.
        """
        if again := inside_backward():
            known = self.recomputed.get(math.prod(dims) * parts, set())
        elif self.whole is None:
            raise self._outside(name)
        else:
            known = {self.whole}
        known = {(*whole[:-1], whole[-1] // parts) for whole in known}
        if len(found := {each for each in known if _may_be_flattened(each, dims)}) == 1:
            return found.pop()
        if not found and len(dims) > 1 and (again or any(each[-1] == dims[-1] for each in known)):
            return dims
        raise _other_tokens(name, dims, found or known)

    def _outside(self, name: str) -> Misuse:
        return Misuse(
            f"{name!r} computes a part of each sequence, and was called outside of the blocks of style 'sequence' from "
            f"{self.blocks[0]!r}, which takes that part, to {self.blocks[-1]!r}: call them one after the other, "
            f"{_WHOLE}."
        )


@dataclass(eq=False)
class ModuleExchanges:
    """What one module exchanges of activations.

    Attributes:
        name: of the module.
        ranks: as they exchange in it.
        run: of the blocks that it is in, whose sequences are in parts; None where sequences are whole.
    """

    name: str
    ranks: TensorRanks
    run: SequenceRun | None

    def __post_init__(self) -> None:
        # As exchanges themselves: a compiler would make a graph of each shape of sequences.
        self._apart: Callable[..., Tensor] = torch.compiler.disable(_exchanged_apart)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleExchanges:
        return self

    def whole_input(self, values: Tensor) -> Tensor:
        """The whole input of a module whose matrices are cut, from this rank's part of each sequence."""
        if self.run is None or not self.run.active:
            return self.ranks.copy(values)
        return self._apart(self.run, self.name, values, self.ranks.all_gather_sequence, self.ranks.size)

    def summed_output(self, values: Tensor) -> Tensor:
        """The sum of ranks' outputs; where sequences are in parts, this rank's part of each sequence of it."""
        if self.run is None or not self.run.active:
            return self.ranks.all_reduce(values)
        return self._apart(self.run, self.name, values, self.ranks.reduce_scatter_sequence, 1)


def _exchanged_apart(run: SequenceRun, name: str, values: Tensor, move: Move, parts: int) -> Tensor:
    """An exchange along sequences, also of tokens that the model has flattened; arguments as of `sequences`."""
    dims = tuple(values.shape[:-1])
    apart = run.sequences(name, dims, parts)
    if apart == dims:
        return move(values)
    return move(values.reshape(*apart, values.shape[-1])).flatten(len(dims) - 1, -2)


def _may_be_flattened(apart: Dims, dims: Dims) -> bool:
    """Whether some dims are these with the last ones in one, or are the same."""
    return any(dims == (*apart[:kept], math.prod(apart[kept:])) for kept in range(len(apart)))


def split_between(cuts: TensorCuts, modules: Sequence[tuple[str, nn.Module]]) -> SequenceRun:
    """Have sequences split from the input of the first of these blocks to the output of the last, with their names."""
    (first_name, first), (last_name, last) = modules[0], modules[-1]
    run = SequenceRun([name for name, _ in modules], cuts.ranks.size)
    first.register_forward_pre_hook(_SplitInput(run, cuts.ranks_at(first_name), first_name), with_kwargs=True)
    for name, module in modules[1:]:
        module.register_forward_pre_hook(_CheckInput(run, name), with_kwargs=True)
    for name, module in modules[:-1]:
        module.register_forward_hook(_CheckOutput(run, name))
    last.register_forward_hook(_JoinOutput(run, cuts.ranks_at(last_name), last_name))
    cuts.model.register_forward_hook(_CheckEnd(run), always_call=True)
    return run


@dataclass
class _SplitInput:
    run: SequenceRun
    ranks: TensorRanks
    name: str

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.run.block = self.name
        if others_with_gradients((args, kwargs), first_activation(args, kwargs)):
            raise _second_input(module, self.name)
        return with_first_changed(module, args, kwargs, lambda values: self.run.begin(self.ranks, values))


@dataclass
class _CheckInput:
    """Tensors of the shape of the first are parts as well."""

    run: SequenceRun
    name: str

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.run.block = self.name
        first = first_activation(args, kwargs)
        self.run.check_input(self.name, first)
        if any(not _alike(each, first) for each in others_with_gradients((args, kwargs), first)):
            raise _second_input(module, self.name)


@dataclass
class _CheckOutput:
    """Tensors of the shape of the first are parts as well."""

    run: SequenceRun
    name: str

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.run.block = None
        first = next((each for each in tree_leaves(output) if isinstance(each, Tensor)), None)
        if any(not _alike(each, first) for each in others_with_gradients(output, first)):
            raise _second_output(module, self.name)


@dataclass
class _JoinOutput:
    run: SequenceRun
    ranks: TensorRanks
    name: str

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.run.block = None
        if isinstance(output, Tensor):
            return self.run.end(self.ranks, output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            if others_with_gradients(output[1:], None):
                raise _second_output(module, self.name)
            return (self.run.end(self.ranks, output[0]), *output[1:])
        raise Misuse(
            f"The last module whose sequences are split, a {type(module).__name__}, returns a "
            f"{type(output).__name__}, in which nothing says what the sequence is: return it alone, or first of a "
            "tuple; or pass sequence=False to tz.parallelize."
        )


@dataclass
class _CheckEnd:
    """At the end of a model's forward, also of one that has raised, sequences are whole again."""

    run: SequenceRun

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        run = self.run
        if torch.compiler.is_compiling() or run.whole is None:
            return
        is_split, run.active, run.whole = run.active, True, None
        error = sys.exc_info()[1] if output is None else None
        if is_split and error is None:
            raise Misuse(
                f"The model's forward began with the blocks of style 'sequence' at {run.blocks[0]!r} and ended without "
                f"{run.blocks[-1]!r}, their last one, which puts the ranks' parts together: run all of them, {_WHOLE}."
            )
        if is_split and isinstance(error, RuntimeError) and run.block is None:
            error.add_note(
                f"Between {run.blocks[0]!r} and {run.blocks[-1]!r}, of style 'sequence', activations are this rank's "
                "part of each sequence: put a residual around such a block into the block, and what else takes whole "
                f"sequences before or behind them; {_WHOLE}."
            )


def _alike(values: Tensor, first: Tensor | None) -> bool:
    return first is not None and values.shape == first.shape


def _shown(dims: Sequence[int]) -> str:
    return f"[{', '.join(map(str, dims))}, channels]"


def _other_shape(name: str, does: str, dims: Sequence[int], part: Sequence[int]) -> Misuse:
    return Misuse(
        f"{name!r}, of style 'sequence', {does} {_shown(dims)}, which is no part {_shown(part)} of the sequences that "
        "the first block before it was given. What changes their number or length, as pooling does, has no place "
        f"between such blocks or inside of one; name those alone 'sequence' that follow one another, {_WHOLE}."
    )


def _other_tokens(name: str, dims: Sequence[int], known: set[Dims]) -> Misuse:
    of = " or ".join(map(_shown, sorted(known))) or "none of the shapes before"
    return Misuse(
        f"{name!r}, in a block of style 'sequence', computes with {_shown(dims)}, and the sequences there are {of}: "
        "which of its rows are whose tokens is not known. Give its matrices the tensor as [batch, tokens, channels], "
        f"{_WHOLE}."
    )


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
