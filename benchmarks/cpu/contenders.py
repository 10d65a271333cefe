"""Who is compared: each contender turns the same plain model into its own training loop.

Every one is set up as its documentation recommends for this model: one unit per block, and the options that save copies
switched on. Libraries are imported only by the contender that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.cpu import axes, mixture, muon, stages
from benchmarks.cpu.cases import Case
from benchmarks.cpu.loops import HYPERPARAMETERS, Contender, Counted, Loop, adamw, autocast, deepspeed_config
from benchmarks.cpu.models import UNITS


class Alone(Loop):
    """The floor: no communication at all, and an optimizer step on this rank's share of the elements alone."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        super().__init__(model, case)
        self.model = model
        numel = sum(p.numel() for p in model.parameters() if p.requires_grad) // dist.get_world_size()
        self.share = nn.Parameter(torch.zeros(numel))
        self.gradient = torch.ones(numel)
        self.optimizer = adamw([self.share])

    def computing(self) -> AbstractContextManager[Any]:
        return autocast(self.case)

    def update(self) -> None:
        self.share.grad = self.gradient
        self.optimizer.step()
        self.model.zero_grad()


class Ddp(Loop):
    """DistributedDataParallel."""

    model: DistributedDataParallel

    def __init__(self, model: nn.Module, case: Case) -> None:
        super().__init__(model, case)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> Optimizer:
        return adamw(self.model.parameters())

    def not_last(self) -> AbstractContextManager[Any]:
        return self.model.no_sync()

    def computing(self) -> AbstractContextManager[Any]:
        return autocast(self.case)


class ZeroRedundancy(Ddp):
    """DistributedDataParallel with torch's ZeRO-1 optimizer."""

    def _optimizer(self) -> Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            (p for p in self.model.parameters() if p.requires_grad),
            optimizer_class=AdamW,
            parameters_as_bucket_view=True,
            **HYPERPARAMETERS,
        )


class Fsdp1(Loop):
    """FullyShardedDataParallel, FULL_SHARD."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        super().__init__(model, case)
        mixed = MixedPrecision(torch.bfloat16, torch.float32) if case.precision == "bf16" else None
        self.model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(UNITS),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            mixed_precision=mixed,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        self.optimizer = adamw(self.model.parameters())

    def clip(self, norm: float) -> None:
        self.model.clip_grad_norm_(norm)  # type: ignore[operator]


class Fsdp2(Loop):
    """fully_shard on each block, then on the whole model."""

    def __init__(self, model: nn.Module, case: Case, reshard_after_forward: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(model, case)
        policy = MixedPrecisionPolicy()
        if case.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "mp_policy": policy}
        for module in model.modules():
            if isinstance(module, UNITS):
                fully_shard(module, reshard_after_forward=reshard_after_forward, **options)
        fully_shard(model, **options)
        self.model, self.optimizer = model, adamw(model.parameters())

    def backward(self, loss: Tensor, last: bool) -> None:
        self.model.set_is_last_backward(last)  # type: ignore[operator]
        super().backward(loss, last)


class DeepSpeed(Loop):
    """deepspeed.initialize with the same AdamW."""

    def __init__(self, model: nn.Module, case: Case, stage: int) -> None:
        import deepspeed

        super().__init__(model, case)
        config = deepspeed_config(stage, case.precision == "bf16", case.batch, case.accumulate, case.clip)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=adamw(trained), config=config, dist_init_required=False
        )
        self.model = self.engine

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.backward(loss * self.case.accumulate)  # it divides by the number of micro-batches itself
        if not last:
            self.engine.step()

    def update(self) -> None:
        self.engine.step()


class Terrazzo(Counted):
    """One row of the table."""

    def __init__(self, model: nn.Module, case: Case, plan: str) -> None:
        import terrazzo as tz

        super().__init__(model, case)
        optimizer = adamw(model.parameters())
        units = [kind for kind in UNITS if any(isinstance(module, kind) for module in model.modules())]
        self.model, self.optimizer = tz.shard(model, optimizer, plan=plan, units=units, precision=case.precision)
        self._accumulate, self._clip = tz.accumulate, tz.clip_grad_norm_

    def not_last(self) -> AbstractContextManager[Any]:
        return self._accumulate(self.model)

    def clip(self, norm: float) -> None:
        self._clip(self.model, norm)


CONTENDERS = {
    "alone": Contender(Alone, "torch", trains=False),
    "ddp": Contender(Ddp, "torch.nn.parallel"),
    "zero-redundancy": Contender(ZeroRedundancy, "torch.distributed.optim"),
    "fsdp1": Contender(Fsdp1, "torch.distributed.fsdp"),
    "fsdp2": Contender(partial(Fsdp2, reshard_after_forward=True), "torch.distributed.fsdp"),
    "fsdp2-keep": Contender(partial(Fsdp2, reshard_after_forward=False), "torch.distributed.fsdp"),
    **{f"deepspeed-{stage}": Contender(partial(DeepSpeed, stage=stage), "deepspeed") for stage in range(4)},
    **{
        f"terrazzo-{plan}": Contender(partial(Terrazzo, plan=plan), "terrazzo")
        for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")
    },
    **axes.CONTENDERS,
    **stages.CONTENDERS,
    **mixture.CONTENDERS,
    **muon.CONTENDERS,
}


def installed(names: Iterable[str]) -> list[str]:
    """Those contenders whose library is here."""
    return [name for name in names if find_spec(CONTENDERS[name].library.split(".")[0])]
