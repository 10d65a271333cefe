"""The full weights of a sharded model, on the ranks that ask for them."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrazzo.checkpoint.names import parameter_names, persistent_buffers
from terrazzo.engine import Piece, engine_of

__all__ = ["full_state_dict"]


def full_state_dict(model: nn.Module, wanted: bool, everywhere: bool = False) -> dict[str, Tensor]:
    """Weights, master weights where there are any, and persistent buffers. Collective.

    One tensor at a time is put together, on this rank's device, and moved to the CPU.

    Args:
        wanted: whether this rank gets them; else its dict is empty.
        everywhere: ranks other than the first may want them.

    Returns:
        Full tensors under every name that `state_dict()` has; those of one tied parameter share memory.
    """
    engine = engine_of(model)
    held: dict[str, list[Piece]] = defaultdict(list)
    for piece in engine.pieces(with_optimizer=False):
        held[piece.name].append(piece)
    named = dict(model.named_parameters(remove_duplicate=False))
    masters = {member.name: bucket.master.dtype for bucket in engine.trainable() for member in bucket.members}
    found: dict[str, Tensor] = {}
    for names in parameter_names(model):
        parameter = named[names[0]]
        dtype = masters.get(names[0], parameter.dtype)
        flat = torch.zeros(parameter.numel(), dtype=dtype, device=engine.axes.device)
        for piece in held.pop(names[0], ()):
            flat[piece.start : piece.stop] = piece.tensor.to(flat.device)
        dist.all_reduce(flat) if everywhere else dist.reduce(flat, 0)  # each element is on one rank, and zero elsewhere
        if wanted:
            found |= dict.fromkeys(names, flat.view(parameter.shape).cpu())
    for buffer in persistent_buffers(model) if wanted else ():
        found |= dict.fromkeys(buffer.names, buffer.tensor.detach().to("cpu", copy=True))
    return found
