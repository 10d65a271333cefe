"""Who is compared on a GPU: each contender turns the project's decoder into a training loop of its own.

All compute in bf16, reduce and update in fp32, and run the same blocks, checkpointed and compiled before a contender
sees them. The rotary table stays fp32 everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer

from benchmarks.cpu.loops import HYPERPARAMETERS, deepspeed_config
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig


@dataclass(frozen=True)
class Workload:
    """A model and one rank's batch: `batch` sequences of the longest length that the model takes.

    Attributes:
        checkpointing: whether blocks are run again in backward.
    """

    model: DecoderConfig
    batch: int
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        """In one rank's step."""
        return self.batch * self.model.max_sequence_length

    @property
    def flops(self) -> int:
        """Of forward and backward for one rank's step; recomputation does not count."""
        return self.tokens * self.meta_model().num_flops_per_token(self.model.max_sequence_length)

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return sum(p.numel() for p in self.meta_model().parameters())

    def unit_numels(self) -> tuple[int, int]:
        """Parameters of the root unit (embedding, last norm, head) and of one block."""
        block = sum(p.numel() for p in self.meta_model().blocks[0].parameters())
        return self.numel - self.model.layers * block, block

    def meta_model(self) -> Decoder:
        """The model without memory."""
        with torch.device("meta"):
            return Decoder(self.model)


@dataclass(frozen=True)
class Setup:
    """One contender at one workload.

    Attributes:
        compiler: torch.compile's backend for each block, or None for eager mode.
        steps: in a turn.
        offload: states are in host memory, and updated there.
    """

    contender: str
    workload: Workload
    device: str
    world: int = 1
    compiler: str | None = None
    steps: int = 10
    offload: bool = False


@dataclass
class Loop:
    """A model that is ready to train, and what a step does with it.

    Attributes:
        shards: this rank's part of the weights that the optimizer steps; None for those in its param groups.
    """

    model: Callable[[Tensor], Tensor]
    optimizer: Optimizer
    backward: Callable[[Tensor], object]
    update: Callable[[], object]
    shards: Sequence[Tensor] | None = None


def plain(model: Decoder, setup: Setup) -> Loop:
    """One process of plain PyTorch: bf16 weights and gradients, fp32 master weights, cast by hand."""
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().clone()) for weight in weights]
    for weight in weights:
        weight.data = weight.data.to(torch.bfloat16)
    optimizer = _adamw(masters)

    def update() -> None:
        for master in masters:
            master.grad = torch.empty_like(master)
        torch._foreach_copy_([master.grad for master in masters], [weight.grad for weight in weights])  # type: ignore[misc]
        model.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_([weight.detach() for weight in weights], [master.detach() for master in masters])

    return Loop(model, optimizer, Tensor.backward, update)


def fsdp2(model: Decoder, setup: Setup) -> Loop:
    """fully_shard on each block and on the model; bf16 compute, fp32 reduction. Offloaded, its weights are too."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Inputs are not cast: bf16 weights make bf16 activations, and the rotary table must stay fp32.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": init_device_mesh(setup.device, (setup.world,)), "mp_policy": policy}
    options["offload_policy"] = CPUOffloadPolicy() if setup.offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if next(model.parameters()).is_meta:
        model.to_empty(device=setup.device)
        model.rotary.reset_parameters()
    return _stock(model, _adamw(model.parameters()))


def terrazzo(model: Decoder, setup: Setup) -> Loop:
    """Plan zero3 in precision bf16; offloaded, zero3@cpu, whose bf16 weights stay on the device."""
    import terrazzo as tz
    from terrazzo.engine import engine_of
    from terrazzo.engine.buckets.resting.buffer import Buffer

    mesh = init_device_mesh(setup.device, (setup.world,), mesh_dim_names=("dp_shard",))
    plan = "zero3@cpu" if setup.offload else "zero3"
    sharded, optimizer = tz.shard(model, _adamw, plan, units=[Block], precision="bf16", mesh=mesh)
    masters = [bucket.master for unit in engine_of(sharded).units for bucket in unit.buckets]
    shards = [master.data for master in masters if isinstance(master, Buffer)]
    return replace(_stock(sharded, optimizer), shards=shards)


def deepspeed(model: Decoder, setup: Setup) -> Loop:
    """ZeRO stage 3 with the same AdamW; offloaded, with its own, whose bf16 weights stay on the device."""
    config, optimizer = deepspeed_config(3, bf16=True, batch=setup.workload.batch), _adamw(model.parameters())
    if setup.offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        own = {key: value for key, value in HYPERPARAMETERS.items() if key != "fused"}
        optimizer = DeepSpeedCPUAdam(model.parameters(), **own)
    engine, optimizer, _, _ = importlib.import_module("deepspeed").initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    model.rotary.float().reset_parameters()  # it was cast to bf16 with the weights
    return Loop(engine, optimizer, engine.backward, engine.step)


CONTENDERS = {"plain": plain, "fsdp2": fsdp2, "terrazzo": terrazzo, "deepspeed": deepspeed}


def _stock(model: nn.Module, optimizer: Optimizer) -> Loop:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, optimizer, Tensor.backward, update)


def _adamw(parameters: Iterable[nn.Parameter]) -> AdamW:
    return AdamW(parameters, **HYPERPARAMETERS)
