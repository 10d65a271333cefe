"""Who is compared where ranks have other layers: pipelines, alone and with fully sharded states on the other axis.

All run 1F1B over the same halves of the blocks, one of ours the zero-bubble schedule beside it, and divide gradients by
the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cpu.cases import Case
from benchmarks.cpu.loops import Contender, Counted, Loop, adamw, deepspeed_config
from benchmarks.cpu.models import Divisible, DivisibleBlock

MicroBatches = Sequence[tuple[Tensor, Tensor]]


class TorchStages(Loop):
    """`torch.distributed.pipelining`; `sharded` with `fully_shard` over the ranks of a stage."""

    def __init__(self, model: nn.Module, case: Case, sharded: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        super().__init__(model, case)
        assert isinstance(model, Divisible)
        sizes = case.sharing, dist.get_world_size() // case.sharing
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("stages", "data"))
        self.group = mesh.get_group("stages")
        own = _halves(model)[self.group.rank()]
        for block in own if sharded else ():
            if isinstance(block, DivisibleBlock):
                fully_shard(block, mesh=mesh["data"])
        if sharded:
            fully_shard(own, mesh=mesh["data"])
        self.model = own
        stage = PipelineStage(own, self.group.rank(), case.sharing, torch.device("cpu"), group=self.group)
        self._schedule = Schedule1F1B(stage, case.accumulate, loss_fn=_loss)
        self.optimizer = adamw(self.model.parameters())

    def micro_batches(self, batches: MicroBatches) -> Tensor:
        tokens, targets = (torch.cat(each) for each in zip(*batches, strict=True))
        losses: list[Tensor] = []
        given = (tokens,) if self.group.rank() == 0 else ()
        if self.group.rank() == self.case.sharing - 1:
            self._schedule.step(*given, target=targets, losses=losses)
        else:
            self._schedule.step(*given)
        return torch.stack(losses).detach().mean() if losses else torch.zeros(())

    def shown(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss, group=self.group)  # zero but on the last stage
        return loss


class DeepSpeedStages(Loop):
    """`PipelineModule`, which takes ZeRO of stages 0 and 1; the same halves, as `uniform` parts them."""

    def __init__(self, model: nn.Module, case: Case, stage: int) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        super().__init__(model, case)
        assert isinstance(model, Divisible)
        first, second = map(list, _halves(model))
        # The norm and the head are one layer: as many layers to each half.
        layers = [*first, *second[:-2], nn.Sequential(*second[-2:])]
        deepspeed.init_distributed("gloo")
        piped = PipelineModule(layers, num_stages=case.sharing, loss_fn=_loss, partition_method="uniform")
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=piped,
            optimizer=adamw(piped.parameters()),
            config=deepspeed_config(stage, False, case.batch, case.accumulate),
            dist_init_required=False,
        )
        self.model = self.engine

    def micro_batches(self, batches: MicroBatches) -> Tensor:
        """With the optimizer's step, which its schedule ends with; what it returns is the mean over all ranks."""
        self.engine.train_batch(iter(batches))
        found: Tensor | None = self.engine.total_loss  # of this rank's micro-batches, on the last stage
        return torch.zeros(()) if found is None else found.detach() / len(batches)

    def shown(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss, group=self.engine.grid.get_pipe_parallel_group())
        return loss

    def update(self) -> None:
        """Nothing is left to do."""


class TerrazzoStages(Counted):
    """A row of the table with `pp`."""

    def __init__(self, model: nn.Module, case: Case, plan: str, schedule: str = "1f1b") -> None:
        import terrazzo as tz

        super().__init__(model, case)
        mesh, half = tz.mesh(pp=case.sharing), case.shape.blocks // case.sharing
        line = tz.Pipeline(schedule, line=["embedding", "blocks.*", "norm", "head"], split=[f"blocks.{half}"])
        tz.parallelize(model, mesh, pipeline=line)
        optimizer = adamw(model.parameters())
        self.model, self.optimizer = tz.shard(model, optimizer, plan=plan, units=[DivisibleBlock], mesh=mesh)
        self.readers, self._step = dist.get_world_size() // case.sharing, tz.step

    def micro_batches(self, batches: MicroBatches) -> Tensor:
        count = len(batches)
        return self._step(self.model, batches, _loss, denominator=count * self.readers) / count


def _halves(model: Divisible) -> list[nn.Sequential]:
    """Of two stages."""
    half = len(model.blocks) // 2
    first: list[Any] = [model.embedding, *model.blocks[:half]]
    return [nn.Sequential(*first), nn.Sequential(*model.blocks[half:], model.norm, model.head)]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


CONTENDERS = {
    "torch-stages": Contender(partial(TorchStages, sharded=False), "torch.distributed.pipelining"),
    "fsdp2-stages": Contender(partial(TorchStages, sharded=True), "torch.distributed.pipelining"),
    **{f"deepspeed-{stage}-stages": Contender(partial(DeepSpeedStages, stage=stage), "deepspeed") for stage in (0, 1)},
    **{
        f"terrazzo-{plan}-stages": Contender(partial(TerrazzoStages, plan=plan), "terrazzo")
        for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")
    },
    "terrazzo-zero0-zero_bubble": Contender(partial(TerrazzoStages, plan="zero0", schedule="zero_bubble"), "terrazzo"),
}
