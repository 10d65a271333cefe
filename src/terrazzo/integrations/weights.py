"""The full weights of a sharded model, on the ranks that ask for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrazzo.engine import Piece, engine_of, parameter_names, persistent_buffers

__all__ = ["full_state_dict", "whole_weights"]


def whole_weights(model: nn.Module, names: Iterable[str], everywhere: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Each of these parameters whole, one after the other; master weights where there are any. Collective.

    Args:
        names: as `named_parameters()` has them, in the same order on every rank.
        everywhere: on every rank; else what ranks other than the first get is not to be used.

    Yields:
        Name and full tensor, on the CPU, in the dtype that it is kept in.
    """
    engine = engine_of(model)
    held: dict[str, list[Piece]] = defaultdict(list)
    for piece in engine.pieces(with_optimizer=False):
        held[piece.name].append(piece)
    kept = {each.name: each for each in engine.parameters()}
    for name in names:
        own, dtype = kept[name], kept[name].dtype
        raw = torch.zeros(own.numel * dtype.itemsize, dtype=torch.uint8, device=engine.axes.device)
        for piece in held.pop(name, ()):
            part = piece.tensor.detach().contiguous().view(torch.uint8)
            raw[piece.start * dtype.itemsize : piece.stop * dtype.itemsize] = part.to(raw.device)
        dist.all_reduce(raw) if everywhere else dist.reduce(raw, 0)  # of bytes: one rank has each, the others add 0
        yield name, raw.cpu().view(dtype).reshape(own.shape)


def full_state_dict(model: nn.Module, wanted: bool, everywhere: bool = False) -> dict[str, Tensor]:
    """Weights, master weights where there are any, and persistent buffers. Collective.

    Args:
        wanted: whether this rank gets them; else its dict is empty.
        everywhere: ranks other than the first may want them.

    Returns:
        Full tensors under every name that `state_dict()` has; those of one tied parameter share memory.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    groups = {names[0]: names for names in parameter_names(model)}
    found: dict[str, Tensor] = {}
    for name, values in whole_weights(model, groups, everywhere):
        if wanted:
            values = values if named[name].requires_grad else values.to(named[name].dtype)
            found |= dict.fromkeys(groups[name], values)
    for buffer in persistent_buffers(model) if wanted else ():
        found |= dict.fromkeys(buffer.names, buffer.tensor.detach().to("cpu", copy=True))
    return found
