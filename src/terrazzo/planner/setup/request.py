"""What a user asks for, as plainly as on a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from terrazzo.engine import Plan
from terrazzo.parallel import Mode
from terrazzo.planner.machine.devices import Device
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.setup import choice_names
from terrazzo.planner.setup.arguments import checked
from terrazzo.planner.setup.framework import TERRAZZO, Framework
from terrazzo.planner.setup.setup import AttentionKernel, Loss, PipelineOrder, Ranking, TpOverlap, UpdateKernel

__all__ = ["ModelSource", "Request"]

ModelSource = str | Path | nn.Module | int | float | Mapping[str, Any] | ModelShape


@dataclass(frozen=True)
class Request:
    """What a user asks for. None leaves a choice open: `build_setup` takes the default, `search` tries what may do.

    Attributes:
        model: preset, path of a config.json or its folder, module, mapping, number of parameters, or shape.
        gpus: devices in all; for `search` and sizing also a range such as `"8..1024"`; None for any number.
        gpu: name of the device, by default `h100-sxm`. `cpu` is this machine, whose memory all ranks share, or
            on several such machines `per_node` of them.
        strategy: plan, or the name of one, such as `zero3`, `hybrid_shard` or `zero2@cpu`; by default `zero3`.
        sequence: tokens per sequence, by default the model's positions but at most 4,096.
        micro_batch: sequences per forward pass and data rank, by default 1.
        global_batch: sequences per optimizer step; micro_batches: forward passes per step and data rank. At most one of
            them; by default one micro-batch, or 8 per pipeline stage.
        loss: `full`, `fused`, `chunked` or `parts`, by default `full`; `parts` where ranks along tp have parts of the
            vocabulary, as in `terrazzo train`; `fused` as in Megatron-core.
        checkpointing: of activations: `none` (default), `selective`, `selective_half`, `full`, `every_N`.
        optimizer_kernel: `fused`, `foreach` or `loop`, by default what the engine takes: `fused` for Adam and AdamW.
        precision: `NAME[,KEY=VALUE]…` with a name and keys of `choice_names`, by default `bf16`, or `fp16` on a GPU
            without bf16.
        optimizer: name in `optimizers`, by default `adamw`.
        attention: `flash` by default, or `math` where torch or transformers keep scores (`setup.kernels`).
        dp_replicate: groups of the hybrid strategies; by default one shard group per host.
        tensor_overlap: which exchanges along tp run beside products: `none` does by default, and those of `backward` in
            Megatron-core; `async` means all, in parts, as torch's async TP.
        context: how ranks along cp compute attention together: `gather` (default), `ulysses` or `ring`.
        memory_bytes, per_node, peak_flops, memory_bandwidth, scaleup_bandwidth, internode_bandwidth, pcie_bandwidth: in
            place of the device's own, in B, FLOP/s and B/s; the peak is that of the format that products run in.
        reserve_bytes: of one device's memory, left to others, such as a display.
        watts: that one device may draw, in place of its own. launch_s: host time for launching the kernels of one eager
            block, forward and backward; by default that of an A100 host of 2022.
        price_per_hour: of one device. host_memory_bytes, disk_bytes, disk_bandwidth: per host.
        framework: that is to run it, or its name, such as `fsdp2` or `deepspeed@0.18`: what is known to fail there is
            refused. Of `megatron` all is counted as Megatron-core takes it, else as the engine does.
        pipeline, virtual_stages: the schedule and the stages of each rank, by default `1f1b` and 1; several stages
            interleave `1f1b`.
        lora: rank of adapters on a frozen base; qlora: keep that base in 4 bits, with adapters of rank 16 by default.
            freeze: globs of what is not trained.
        ema: a moving average of the weights is kept, as a loop with `tz.EMA` does.
        parallel, offload: let `search` try tensor, pipeline, context and expert parallelism, and offload.
        rank_by: what `search` puts first: most tokens per second, fewest GPUs, or least cost per token.

    Raises:
        BadInput: what a field cannot hold, or options that exclude each other.
    """

    model: ModelSource
    gpus: int | str | None = None
    gpu: str | Device | None = None
    strategy: str | Plan | None = None
    sequence: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    micro_batches: int | None = None
    checkpointing: str | None = None
    precision: str | None = None
    optimizer: str | None = None
    optimizer_kernel: UpdateKernel | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp_replicate: int | None = None
    context: Mode | None = None
    virtual_stages: int | None = None
    pipeline: PipelineOrder | None = None
    sequence_parallel: bool = True
    tensor_overlap: TpOverlap | None = None
    compile: bool = False
    attention: AttentionKernel | None = None
    loss: Loss | None = None
    prefetch: int = 1
    accumulate_locally: bool | None = None
    framework: str | Framework = TERRAZZO
    memory_bytes: float | None = None
    reserve_bytes: float | None = None
    per_node: int | None = None
    peak_flops: float | None = None
    memory_bandwidth: float | None = None
    scaleup_bandwidth: float | None = None
    internode_bandwidth: float | None = None
    pcie_bandwidth: float | None = None
    watts: float | None = None
    launch_s: float | None = None
    price_per_hour: float | None = None
    host_memory_bytes: float | None = None
    disk_bytes: float | None = None
    disk_bandwidth: float | None = None
    lora: int | None = None
    qlora: bool = False
    freeze: str | Sequence[str] | None = None
    ema: bool = False
    parallel: bool = False
    offload: bool = False
    rank_by: Ranking = "throughput"

    def __post_init__(self) -> None:
        optional = [field.name for field in fields(self) if field.default is None]
        for name, value in checked(vars(self), optional).items():
            object.__setattr__(self, name, value)
        if isinstance(self.strategy, str):
            object.__setattr__(self, "strategy", choice_names.strategy(self.strategy))
        if isinstance(self.framework, str):
            object.__setattr__(self, "framework", Framework.parse(self.framework))

    @property
    def plan(self) -> Plan | None:
        """The plan of `strategy`, by whatever name that was given."""
        assert not isinstance(self.strategy, str)
        return self.strategy

    @property
    def runs_in(self) -> Framework:
        """The framework of `framework`, by whatever name that was given."""
        assert not isinstance(self.framework, str)
        return self.framework

    @property
    def as_megatron(self) -> bool:
        """Whether Megatron-core runs it, as `Setup.as_megatron`."""
        return self.runs_in.name == "megatron"
