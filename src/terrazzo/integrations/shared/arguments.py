"""The arguments of `tz.shard`, as users of another library's loop give them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine import Offload, Plan, Precision, Units

__all__ = ["TerrazzoArguments"]


@dataclass(frozen=True)
class TerrazzoArguments:
    """What goes before the other library's own arguments, as for `tz.shard`; None leaves it to them.

    Attributes:
        plan: such as `zero3`. TrainingArguments say it by `fsdp` or `deepspeed`, and without those mean `zero0`, DDP.
        precision: such as `bf16`. TrainingArguments' `bf16` without FSDP is autocast on fp32 weights.
        units: class names of the modules that are gathered as one.
        mesh: of all ranks.
        prefetch: units gathered ahead.
        offload: how states on `cpu` or `nvme` are kept.
    """

    plan: Plan | str | None = None
    precision: Precision | str | torch.dtype | None = None
    units: Units | None = None
    mesh: DeviceMesh | None = None
    prefetch: int | None = None
    offload: Offload | None = None

    def set_ones(self) -> dict[str, Any]:
        """The arguments that are not None, by their names, which are `tz.shard`'s."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def with_defaults(self, others: TerrazzoArguments) -> TerrazzoArguments:
        """These; where they are None, the others."""
        return replace(others, **self.set_ones())

    def resolved(self) -> Self:
        """With a `Plan` and a `Precision` in place of their names.

        Raises:
            BadInput: a name that none has.
        """
        plan = Plan.named(self.plan) if isinstance(self.plan, str) else self.plan
        precision = self.precision
        if isinstance(precision, str | torch.dtype):
            precision = Precision.named(precision)
        return replace(self, plan=plan, precision=precision)
