"""Who is compared where ranks share the experts of a Mixtral of transformers: its own plan over FSDP2, and ours.

All other states, and those of the experts over ranks that have the same ones, are fully sharded, a unit per layer.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from benchmarks.cpu.cases import Case
from benchmarks.cpu.loops import HYPERPARAMETERS, Contender, Counted, Loop, adamw

SHARING = 2
"""Ranks that have other experts."""


class _Mixture(Loop):
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits.flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


class TransformersExperts(_Mixture):
    """`DistributedConfig(fsdp_size=..., ep_size=...)`: what `from_pretrained` does with it, of these weights."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        from torch.distributed.fsdp import FSDPModule
        from transformers.distributed import DistributedConfig
        from transformers.distributed.utils import initialize_distributed_mesh

        super().__init__(model, case)
        config = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=SHARING)
        _, mesh = initialize_distributed_mesh(config)
        own: Any = model
        self.model = own.maybe_distribute_model(own, config, mesh)
        assert isinstance(self.model, FSDPModule)
        experts = [each for name, each in model.named_parameters() if ".experts." in name]
        others = [each for name, each in model.named_parameters() if ".experts." not in name]
        self.optimizer = AdamW([{"params": experts}, {"params": others}], **HYPERPARAMETERS)  # on other meshes


class TerrazzoExperts(Counted, _Mixture):
    """`zero3` with `ep`."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        import terrazzo as tz

        super().__init__(model, case)
        own: Any = model
        mesh, units = tz.mesh(ep=SHARING), [type(own.model.layers[0])]
        tz.parallelize(model, mesh)
        self.model, self.optimizer = tz.shard(model, adamw(model.parameters()), plan="zero3", units=units, mesh=mesh)


CONTENDERS = {
    "fsdp2-experts": Contender(TransformersExperts, "transformers"),
    "terrazzo-zero3-experts": Contender(TerrazzoExperts, "terrazzo"),
}
