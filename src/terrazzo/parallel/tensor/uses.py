"""What modules do around their own forward so that ranks may have parts of their weights.

Hooks and forwards hold a `TensorUse`, which a copy of the model shares: they may be copied with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput, Misuse
from terrazzo.marks import Mark
from terrazzo.nn.forwards import replace_forward
from terrazzo.nn.loss import outside_part
from terrazzo.nn.products import product_of
from terrazzo.parallel.tensor.ranks import TensorRanks

__all__ = [
    "LocalRows",
    "PartialSums",
    "TensorUse",
    "enter",
    "gather_outputs",
    "put_forward",
    "split_inputs",
    "split_run",
    "take_part",
]


@dataclass
class TensorUse:
    """Tensor parallelism of one model.

    Attributes:
        split: whether sequences are split between matrices, in modules that are said to do so. Off for a forward
            without gradients whose sequence does not divide, such as that of a text that is being written.
    """

    ranks: TensorRanks
    split: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorUse:
        return self

    def enter(self, values: Tensor, splits: bool) -> Tensor:
        """The whole input of a module whose matrices are cut."""
        return self.ranks.gather_sequence(values) if splits and self.split else self.ranks.copy(values)

    def leave(self, values: Tensor, splits: bool) -> Tensor:
        """What the ranks' parts of a sum come to."""
        return self.ranks.scatter_sum(values) if splits and self.split else self.ranks.sum(values)

    def begin(self, values: Tensor) -> Tensor:
        """This rank's part of each sequence.

        Raises:
            BadInput: where there will be gradients, which weights get from parts alone, and the length does not divide.
        """
        length, parts = values.shape[-2], self.ranks.size
        self.split = length % parts == 0
        if not self.split and torch.is_grad_enabled():
            raise BadInput(
                f"Sequences of {length} positions do not divide over tp {parts}: pad or cut them to a multiple of "
                f"{parts}, or keep them whole between matrices with tz.parallelize(..., sequence=False)."
            )
        return self.ranks.split_sequence(values) if self.split else values

    def end(self, values: Tensor) -> Tensor:
        """Whole sequences again."""
        was_split, self.split = self.split, True
        return self.ranks.join_sequence(values) if was_split else values


@dataclass
class _Enter:
    use: TensorUse
    splits: bool
    name: str
    takes_weights: bool

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = _with_first(module, args, kwargs, lambda values: self.use.enter(values, self.splits))
        if not self.takes_weights and _with_gradients((args, kwargs), _first_of(args, kwargs)):
            raise Misuse(
                f"{self.name!r}, a {type(module).__name__}, was given a second tensor that needs gradients, and ranks "
                "exchange the first alone: each would have a part of the other's gradient. Do not give this module the "
                "style 'enter' but its matrices theirs, each 'column' then exchanging its own input, and pass "
                "sequence=False to tz.parallelize where that tensor has another sequence."
            )
        return args, kwargs


@dataclass
class _Begin:
    use: TensorUse
    name: str

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if _with_gradients((args, kwargs), _first_of(args, kwargs)):
            raise _whole_beside(module, self.name)
        return _with_first(module, args, kwargs, self.use.begin)


@dataclass
class _Within:
    """What a module is given and returns where sequences are split. Tensors like the first are parts as well."""

    name: str

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        first = _first_of(args, kwargs)
        if any(not _alike(each, first) for each in _with_gradients((args, kwargs), first)):
            raise _whole_beside(module, self.name)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        first = next((each for each in tree_leaves(output) if isinstance(each, Tensor)), None)
        if any(not _alike(each, first) for each in _with_gradients(output, first)):
            raise _part_beside(module, self.name)


@dataclass
class _End:
    use: TensorUse
    name: str

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self.use.end(output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            if _with_gradients(output[1:], None):
                raise _part_beside(module, self.name)
            return (self.use.end(output[0]), *output[1:])
        raise Misuse(
            f"The last module whose sequences are split, a {type(module).__name__}, returns a "
            f"{type(output).__name__}, in which nothing says what the sequence is: return it alone, or first of a "
            "tuple; or pass sequence=False to tz.parallelize."
        )


def _whole_beside(module: nn.Module, name: str) -> Misuse:
    return Misuse(
        f"{name!r}, a {type(module).__name__} whose sequences are split, was given a second tensor that needs "
        "gradients, of which each rank would have those of its own positions alone. Pass sequence=False to "
        "tz.parallelize."
    )


def _part_beside(module: nn.Module, name: str) -> Misuse:
    return Misuse(
        f"{name!r}, a {type(module).__name__} whose sequences are split, returns another tensor with gradients beside "
        "the sequence: it is of this rank's positions alone. Pass sequence=False to tz.parallelize, or detach it where "
        "it is for reading."
    )


def _with_gradients(values: Any, first: Tensor | None) -> list[Tensor]:
    """The tensors in there that a backward will go through, but for `first`."""
    if not torch.is_grad_enabled():
        return []
    leaves = tree_leaves(values)
    return [each for each in leaves if isinstance(each, Tensor) and each is not first and each.requires_grad]


def _first_of(args: Any, kwargs: Any) -> Tensor | None:
    """What `_with_first` changes."""
    return next((value for value in (*args, *kwargs.values()) if _is_activation(value)), None)


def _alike(values: Tensor, first: Tensor | None) -> bool:
    return first is not None and values.shape == first.shape


def _with_first(module: nn.Module, args: Any, kwargs: Any, change: Any) -> Any:
    """Arguments with the first floating-point tensor of two dims or more replaced by what `change` makes of it."""
    for number, value in enumerate(args):
        if _is_activation(value):
            return (*args[:number], change(value), *args[number + 1 :]), kwargs
    for name, value in kwargs.items():
        if _is_activation(value):
            return args, {**kwargs, name: change(value)}
    raise Misuse(
        f"A {type(module).__name__} that tz.parallelize has cut was called without a tensor of activations: its first "
        "one of floating-point numbers, of two dims or more, is what ranks exchange."
    )


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def enter(module: nn.Module, use: TensorUse, splits: bool, name: str, takes_weights: bool) -> None:
    """Put the input of `module` together as it enters; `takes_weights`: it is given its cut matrix beside it."""
    module.register_forward_pre_hook(_Enter(use, splits, name, takes_weights), with_kwargs=True)


def split_run(run: Sequence[tuple[str, nn.Module]], use: TensorUse) -> None:
    """Have sequences split from the input of the first of these modules to the output of the last."""
    (first_name, first), (last_name, last) = run[0], run[-1]
    first.register_forward_pre_hook(_Begin(use, first_name), with_kwargs=True)
    for name, module in run[1:]:
        module.register_forward_pre_hook(_Within(name).before, with_kwargs=True)
    for name, module in run[:-1]:
        module.register_forward_hook(_Within(name).after)
    last.register_forward_hook(_End(use, last_name))


@dataclass
class _GatherOutputs:
    use: TensorUse
    numel: int

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self.use.ranks.join_channels(output, self.numel)


def gather_outputs(module: nn.Module, use: TensorUse, numel: int) -> None:
    """Put all `numel` channels of its output together."""
    module.register_forward_hook(_GatherOutputs(use, numel))


@dataclass
class _SplitInputs:
    use: TensorUse

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(module, args, kwargs, self.use.ranks.split_channels)


def split_inputs(module: nn.Module, use: TensorUse) -> None:
    """Have it take this rank's channels of an input that is whole."""
    module.register_forward_pre_hook(_SplitInputs(use), with_kwargs=True)


@dataclass
class _Look:
    """Which of the asked rows are other ranks'; one look-up at a time. Rows that no rank has are torch's to refuse."""

    use: TensorUse
    start: int
    stop: int
    rows: int
    padding: int | None
    others: Tensor | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        asked, *rest = args if args else (kwargs["input"],) if "input" in kwargs else (None,)
        if not isinstance(asked, Tensor):
            raise Misuse(
                f"A {type(module).__name__} that tz.parallelize has cut was called without a tensor of indices: give "
                "it first, or as 'input', as torch.nn.Embedding takes it."
            )
        self.others = outside_part(asked, self.start, self.stop, self.rows)
        inside = self.padding is not None and self.start <= self.padding < self.stop
        module.padding_idx = self.padding - self.start if inside and self.padding is not None else None  # type: ignore[assignment]
        beside = {name: value for name, value in kwargs.items() if name != "input"}
        return (asked.sub(self.start).masked_fill(self.others, 0), *rest), beside

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        assert self.others is not None, "a look-up has begun"
        others, self.others = self.others, None
        return self.use.leave(output.masked_fill(others.unsqueeze(-1), 0), splits=False)

    def ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """It has returned, or raised."""
        module.padding_idx = self.padding  # type: ignore[assignment]


def take_part(module: nn.Embedding, use: TensorUse, start: int, stop: int, rows: int) -> None:
    """Have it look up rows from `start` to `stop` of `rows`, which this rank has, and sum with the others."""
    look = _Look(use, start, stop, rows, module.padding_idx)
    module.register_forward_pre_hook(look.before, with_kwargs=True)
    module.register_forward_hook(look.ended, always_call=True)
    module.register_forward_hook(look.after)


_USE = Mark[Any]("terrazzo_use")
"""On linear layers with one of the forwards below: what that computes with."""


class PartialSums(nn.Linear):
    """A linear map whose inputs are this rank's part: its outputs are summed, and the bias added once."""

    def forward(self, input: Tensor) -> Tensor:
        use, splits = _USE.of(self)
        summed: Tensor = use.leave(product_of(self)(input, self.weight), splits)
        return summed if self.bias is None else summed + self.bias


class LocalRows(nn.Linear):
    """A linear map that every rank has whole, and of which it computes some of the outputs."""

    def forward(self, input: Tensor) -> Tensor:
        start, stop = _USE.of(self)
        bias = None if self.bias is None else self.bias[start:stop]
        return product_of(self)(input, self.weight[start:stop], bias)


def put_forward(module: nn.Module, forward: type[nn.Linear], use: Any) -> None:
    """Give a linear module another forward, in a class of its own name."""
    _USE.leave(module, use)
    replace_forward(module, forward.forward)
