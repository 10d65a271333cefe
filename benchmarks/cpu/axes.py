"""Who is compared where ranks share matrices or sequences, two by two; the other axis is fully sharded.

Each is set up as its documentation says for this model: sequences are split between the matrices, and the loss is taken
where logits are, in parts of the vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cpu.cases import Case
from benchmarks.cpu.loops import Contender, Counted, Loop, adamw, deepspeed_config
from benchmarks.cpu.models import HEAD_WIDTH, Divisible, DivisibleBlock


class DTensorParallel(Loop):
    """`parallelize_module` with sequence parallelism and `loss_parallel`, then `fully_shard` over the other axis."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            loss_parallel,
            parallelize_module,
        )

        super().__init__(model, case)
        sizes = dist.get_world_size() // case.sharing, case.sharing
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        enter = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        of_model: dict[str, Any] = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        of_block: dict[str, Any] = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": enter,
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": enter,
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(model, mesh["tensor"], of_model)
        blocks = [module for module in model.modules() if isinstance(module, DivisibleBlock)]
        for block in blocks:
            parallelize_module(block, mesh["tensor"], of_block)
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh["data"])
        self.model, self.optimizer, self._apart = model, adamw(model.parameters()), loss_parallel

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._apart():
            return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def backward(self, loss: Tensor, last: bool) -> None:
        with self._apart():
            super().backward(loss, last)

    def shown(self, loss: Tensor) -> Tensor:
        whole: Tensor = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        return whole


class TerrazzoTensor(Counted):
    """A row of the table with `tp`."""

    def __init__(self, model: nn.Module, case: Case, plan: str) -> None:
        import terrazzo as tz

        super().__init__(model, case)
        mesh = tz.mesh(tp=case.sharing)
        heads = tz.parallel.Colwise(heads=case.shape.width // HEAD_WIDTH)
        styles: dict[str, Any] = {
            "embedding": "embedding_rowwise",
            "blocks.*": "sequence",
            "blocks.*.attention": "enter",
            **{f"blocks.*.attention.{name}": heads for name in ("query", "key", "value")},
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp": "enter",
            "blocks.*.mlp.0": "colwise",
            "blocks.*.mlp.2": "rowwise",
            "head": "colwise",
        }
        tz.parallelize(model, mesh, tensor=styles)
        optimizer = adamw(model.parameters())
        self.model, self.optimizer = tz.shard(model, optimizer, plan=plan, units=[DivisibleBlock], mesh=mesh)
        self._loss = tz.parallel.VocabularyLoss(mesh, case.shape.vocabulary)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._loss(self.model(tokens), targets) / targets.numel()


class Ulysses(Loop):
    """DeepSpeed's `DistributedAttention`, with ZeRO-3 over all ranks."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention
        from deepspeed.utils import groups

        super().__init__(model, case)
        assert isinstance(model, Divisible)
        config = deepspeed_config(3, bf16=False, batch=case.batch)
        ranks = dist.get_world_size() // case.sharing, case.sharing
        config |= {"data_parallel_size": ranks[0], "sequence_parallel_size": ranks[1]}
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters()), config=config, dist_init_required=False
        )
        self.model, self.group = self.engine, groups._get_sequence_parallel_group()
        for attention in model.attentions():
            shared = DistributedAttention(_tokens_first, self.group, scatter_idx=2, gather_idx=1)
            attention.attend = partial(_by_deepspeed, shared)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        rank = self.group.rank()
        own = [each.chunk(self.case.sharing, dim=1)[rank].contiguous() for each in (tokens, targets)]
        return F.cross_entropy(self.model(own[0]).flatten(0, 1), own[1].flatten())

    def shown(self, loss: Tensor) -> Tensor:
        return _mean(loss, self.group)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()


class TerrazzoContext(Counted):
    """A row of the table with `cp`."""

    def __init__(self, model: nn.Module, case: Case, plan: str, mode: Any) -> None:
        import terrazzo as tz

        super().__init__(model, case)
        mesh = tz.mesh(cp=case.sharing)
        tz.parallelize(model, mesh, context=mode)
        self.context, self.group = tz.parallel.context_of(model), mesh.get_group("cp")
        optimizer = adamw(model.parameters())
        self.model, self.optimizer = tz.shard(model, optimizer, plan=plan, units=[DivisibleBlock], mesh=mesh)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        assert self.context is not None
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        own, wanted, places = self.context.split(tokens, targets, positions)
        return F.cross_entropy(self.model(own, places).flatten(0, 1), wanted.flatten())

    def shown(self, loss: Tensor) -> Tensor:
        return _mean(loss, self.group)


def _mean(loss: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of ranks that have parts of the same sequences."""
    dist.all_reduce(loss, group=group)
    return loss / group.size()


def _tokens_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of [batch, tokens, heads, HEAD_WIDTH]."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous()


def _by_deepspeed(shared: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = (each.transpose(1, 2).contiguous() for each in (query, key, value))
    mixed: Tensor = shared(*heads, 0)
    return mixed.transpose(1, 2)


CONTENDERS = {
    "fsdp2-tensor": Contender(DTensorParallel, "torch.distributed.fsdp"),
    "terrazzo-zero3-tensor": Contender(partial(TerrazzoTensor, plan="zero3"), "terrazzo"),
    "deepspeed-3-ulysses": Contender(Ulysses, "deepspeed"),
    **{
        f"terrazzo-zero3-{mode}": Contender(partial(TerrazzoContext, plan="zero3", mode=mode), "terrazzo")
        for mode in ("gather", "ulysses", "ring")
    },
}
