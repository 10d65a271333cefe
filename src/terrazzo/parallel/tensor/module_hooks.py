"""Hooks by which modules with cut matrices, and modules around these, exchange their inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from terrazzo.errors import Misuse
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks
from terrazzo.parallel.tensor.arguments import first_activation, others_with_gradients, with_first_changed
from terrazzo.parallel.tensor.sequence_split import ModuleExchanges

__all__ = ["enter", "gather_outputs", "split_inputs"]


def enter(module: nn.Module, exchanges: ModuleExchanges, *, takes_weights: bool) -> None:
    """Have a module compute with its whole input, whose gradient is summed over ranks.

    Args:
        takes_weights: the module is given its cut matrix beside the input.
    """
    module.register_forward_pre_hook(_Enter(exchanges, takes_weights), with_kwargs=True)


def gather_outputs(module: nn.Module, ranks: TensorRanks, channels: int) -> None:
    """Have a module return all `channels` of its output, of which each rank computes a part."""
    module.register_forward_hook(_GatherOutputs(ranks, channels))


def split_inputs(module: nn.Module, ranks: TensorRanks) -> None:
    """Have a module take this rank's channels of an input that every rank has whole."""
    module.register_forward_pre_hook(_SplitInputs(ranks), with_kwargs=True)


@dataclass
class _Enter:
    exchanges: ModuleExchanges
    takes_weights: bool

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = with_first_changed(module, args, kwargs, self.exchanges.whole_input)
        if not self.takes_weights and others_with_gradients((args, kwargs), first_activation(args, kwargs)):
            raise Misuse(
                f"{self.exchanges.name!r}, a {type(module).__name__}, was given a second tensor that needs gradients, "
                "and ranks exchange the first alone: each would have a part of the other's gradient. Do not give this "
                "module the style 'enter' but its matrices theirs, each 'colwise' then exchanging its own input, and "
                "pass sequence=False to tz.parallelize where that tensor has another sequence."
            )
        return args, kwargs


@dataclass
class _GatherOutputs:
    ranks: TensorRanks
    channels: int

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self.ranks.gather_channels(output, self.channels)


@dataclass
class _SplitInputs:
    ranks: TensorRanks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return with_first_changed(module, args, kwargs, self.ranks.scatter_channels)
