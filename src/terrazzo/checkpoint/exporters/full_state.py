"""The full weights of a sharded model, on the ranks that ask for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from terrazzo.engine import whole_state_dict

__all__ = ["full_state_dict"]


def full_state_dict(model: nn.Module, *, keep: bool | None = None) -> dict[str, Any]:
    """What `model.state_dict()` would be if the model were not sharded, on the CPU of rank 0. Collective.

    Memory: the result where it is kept; one unit on the device of every rank, whatever the size of the model.

    Args:
        keep: whether this rank keeps it, else it gets an empty dict; by default rank 0 alone does.

    Returns:
        Full tensors under every name that the model's own `state_dict()` has, in its order. Trained weights are the
        master weights, in their dtype; tied ones share memory. Buffers are this rank's own, or those of the stage that
        runs their modules.

    Raises:
        Misuse: for a model that is not sharded.
    """
    keep = dist.get_rank() == 0 if keep is None else keep
    return whole_state_dict(model, torch.device("cpu"), keep=keep) or {}
