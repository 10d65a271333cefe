"""Dropout under tensor parallelism.

torch's default generators have the same state on the ranks along `tp`, so that these drop the same elements of
activations that all of them have. Where each rank has a part of the activations, it draws from generators of its own:
in blocks that split sequences, and in modules of style `enter` up to the sum of their outputs, behind which all ranks
have the same again. Their seed is drawn from the shared one, so that a region that is recomputed drops the same again.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine import inside_backward
from terrazzo.errors import Misuse

__all__ = ["fork_dropout", "has_dropout", "random_states"]

_APART = 0x9E3779B97F4A7C15
"""What tells seeds of neighbouring ranks apart: 2^64 over the golden ratio."""


def has_dropout(model: nn.Module) -> bool:
    """Whether any module drops something in training, as a share among its attributes shows."""
    for module in model.modules():
        shares = {name: value for name, value in vars(module).items() if "drop" in name or name == "p"}
        if any(isinstance(value, float) and value > 0 for value in shares.values()):
            return True
    return False


@dataclass
class _OwnGenerators:
    """Hooks of one module, and of those inside of it where it comes to other activations.

    Attributes:
        runs: the module runs in training. What runs of it alone, as one that is recomputed, draws from what it finds.
        shared: states of the shared generators, to be restored; None where these are in use.
        joined: their states behind the last sum, with which something else may have been drawn since.
        draws_behind: something has been, so that a sum which is recomputed alone would be followed by other draws.
    """

    rank: int
    runs: bool = False
    shared: list[Tensor] | None = None
    joined: list[Tensor] | None = None
    draws_behind: bool = False

    def begin(self, module: nn.Module, args: Any) -> None:
        self.runs, self.shared, self.joined = module.training, None, None
        self.fork()

    def fork(self, *_: Any) -> None:
        if self.runs and self.shared is None:
            seed = int(torch.randint(2**62, ()))
            self.shared = [each.get_rng_state() for each in _generators()]
            for each in _generators():
                each.manual_seed((seed + self.rank * _APART) % 2**63)

    def join(self, *_: Any) -> None:
        if self.shared is not None:
            for each, state in zip(_generators(), self.shared, strict=True):
                each.set_rng_state(state)
            self.joined, self.shared = self.shared, None
        elif self.draws_behind and inside_backward():
            raise Misuse(
                "What ranks along tp sum inside of a module of style 'enter' is recomputed without that module, and "
                "what is dropped behind the sum would be other than in forward. Recompute the module as a whole, as "
                "by torch.utils.checkpoint around its call, or what is in front of the sum alone."
            )

    def end(self, *_: Any) -> None:
        if self.runs and self.shared is None and self.joined is not None:
            now = [each.get_rng_state() for each in _generators()]
            self.draws_behind |= not all(map(torch.equal, now, self.joined))
        self.join()
        self.runs = False


def fork_dropout(module: nn.Module, rank: int, parts: Sequence[nn.Module] = (), sums: Sequence[nn.Module] = ()) -> None:
    """Have a module draw from generators of this rank's own while it runs in training.

    Args:
        parts: modules inside of it from whose input on each rank has a part of the activations again.
        sums: modules inside of it from whose output on all ranks have the same.
    """
    generators = _OwnGenerators(rank)
    module.register_forward_pre_hook(generators.begin)
    module.register_forward_hook(generators.end, always_call=True)
    for each in parts:
        each.register_forward_pre_hook(generators.fork)
    for each in sums:
        each.register_forward_hook(generators.join, always_call=True)


def _generators() -> list[Any]:
    """Torch's default ones: of the host, and of the device in use."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [torch] if accelerator is None else [torch, torch.get_device_module(accelerator)]


def random_states() -> int:
    """32 bits of the states of torch's default generators."""
    return zlib.crc32(b"".join(each.get_rng_state().numpy().tobytes() for each in _generators()))
