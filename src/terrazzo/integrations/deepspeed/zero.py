"""`deepspeed.zero`: contexts around building a model, and around reading its weights."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.errors import BadInput
from terrazzo.integrations.deepspeed.absent import absent_names
from terrazzo.integrations.shared.first_rank import warn_once

__all__ = ["SHARDED", "GatheredParameters", "Init"]

__getattr__ = absent_names(__name__)

SHARDED: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
"""Models whose parameters `GatheredParameters` finds, in the order of `initialize`, which is one on all ranks."""


class Init(contextlib.nullcontext[None]):
    """Does nothing but say so: the model is built whole on every rank, and `initialize` then shards it.

    A model that does not fit into host memory is built `with torch.device("meta")` instead, where its modules have a
    `reset_parameters`: `initialize` gives it values unit by unit.
    """

    def __init__(self, module: nn.Module | None = None, *args: Any, enabled: bool = True, **options: Any) -> None:
        super().__init__()
        if module is not None:
            raise BadInput("zero.Init(module=...) splits a model that is there; leave that to deepspeed.initialize.")
        if enabled:
            warn_once("deepspeed.zero.Init has no effect: every rank builds the whole model, initialize() shards it.")


@contextlib.contextmanager
def GatheredParameters(
    params: Tensor | Iterable[Tensor], modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Whole values of parameters inside; before `initialize` they are whole anyway. Collective.

    Args:
        params: one or several. All of their model's are gathered with them.
        modifier_rank: what this rank wrote holds on every rank afterwards; None: nothing was to be written.
    """
    wanted = [params] if isinstance(params, Tensor) else list(params)
    ids = {id(tensor) for tensor in wanted}
    owners = [model for model in SHARDED if enabled and any(id(own) in ids for own in model.parameters())]
    with contextlib.ExitStack() as stack:
        for model in owners:
            stack.enter_context(tz.gathered(model, write=modifier_rank is not None))
        yield
        for tensor in wanted if owners and modifier_rank is not None else ():
            with torch.no_grad():
                dist.broadcast(tensor.data, modifier_rank)
