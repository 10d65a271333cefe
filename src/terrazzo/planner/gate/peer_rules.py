"""Combinations that other frameworks refuse, ignore, or run otherwise than asked, in the versions that sources name."""

from __future__ import annotations

import torch

from terrazzo.planner.gate.facts import in_shares, on_disk, tiers, zero_stage
from terrazzo.planner.gate.rule import Rule
from terrazzo.planner.setup.setup import Setup

__all__ = ["PEER_RULES"]

DEEPSPEED, FSDP, MEGATRON, TORCHAO = ("deepspeed",), ("fsdp1", "fsdp2"), ("megatron",), ("torchao",)


_OPTIMIZER = {"grad", "optim"}
"""What DeepSpeed offloads with the optimizer."""


def _partly_offloaded(setup: Setup) -> bool:
    whole = ((), ("weight", "grad", "optim"), ("weight", "between", "grad", "optim"))
    return in_shares(setup) or tuple(tiers(setup)) not in whole


def _accumulates_narrowly(setup: Setup) -> bool:
    return setup.precision.compute != torch.float32 and setup.precision.accumulate == torch.float32


def _no_zero_1_or_2(setup: Setup) -> bool:
    """Only the optimizer, or gradients and optimizer, are split while the weights are not."""
    return zero_stage(setup) in (1, 2)


OF_DEEPSPEED = (
    Rule(
        "AutoTP with ZeRO-3",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.mesh.tp > 1 and zero_stage(setup) == 3 and setup.framework.before(0, 19, 4),
        "Before DeepSpeed 0.19.4, AutoTP trains with ZeRO stages 0 to 2 only.",
        "Use stage 2, or DeepSpeed 0.19.4 or newer.",
        "deepspeedai/DeepSpeed deepspeed/runtime/engine.py: an assertion in 0.19.3, gone in 0.19.4; #8168",
    ),
    Rule(
        "young AutoTP with ZeRO-3",
        DEEPSPEED,
        "warn",
        lambda setup: setup.mesh.tp > 1 and zero_stage(setup) == 3 and not setup.framework.before(0, 19, 4),
        "AutoTP with ZeRO-3 came with DeepSpeed 0.19.4; its tutorial still names stages 0 to 2.",
        "Compare losses with stage 2 before a long run.",
        "deepspeedai/DeepSpeed #8167, #8168; docs/_tutorials/autotp-training.md",
    ),
    Rule(
        "AutoTP in a pipeline",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.mesh.tp > 1 and setup.mesh.pp > 1,
        "DeepSpeed's AutoTP does not combine with its pipeline engine.",
        "Use AutoTP with ZeRO, or Megatron's tensor parallelism under the pipeline.",
        "deepspeedai/DeepSpeed#7147",
    ),
    Rule(
        "PipelineModule with ZeRO-2 or 3",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.mesh.pp > 1 and zero_stage(setup) >= 2,
        lambda it: f"DeepSpeed's PipelineEngine asserts a ZeRO stage below 2; {it.plan} is stage {it.zero_stage}.",
        "Use zero1 with the pipeline, or stage 3 without it.",
        "deepspeedai/DeepSpeed deepspeed/runtime/pipe/engine.py (0.19.7), #1110",
    ),
    Rule(
        "weights offloaded below ZeRO-3",
        DEEPSPEED,
        "refuse",
        lambda setup: "weight" in tiers(setup) and zero_stage(setup) < 3,
        "Below stage 3 DeepSpeed accepts offload_param and ignores it without a word: the weights stay on the GPU.",
        "Use zero3, or offload the optimizer alone.",
        "deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
    ),
    Rule(
        "NVMe below ZeRO-3",
        DEEPSPEED,
        "refuse",
        lambda setup: on_disk(setup, "optim") and zero_stage(setup) < 3,
        "Below stage 3 DeepSpeed treats nvme as cpu without a word: the host must hold it all.",
        "Use zero3@nvme, or ask for cpu and count the host's memory.",
        "deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py (0.19.8)",
    ),
    Rule(
        "offload in shares",
        DEEPSPEED,
        "refuse",
        lambda setup: in_shares(setup) and (zero_stage(setup) < 3 or on_disk(setup) or set(tiers(setup)) != _OPTIMIZER),
        lambda it: (
            "DeepSpeed offloads a share of the optimizer alone (`ratio`, Twin-Flow), from ZeRO-3 to the CPU, not "
            f"{it.offloaded}."
        ),
        "Use zero3 and offload a share of the optimizer, or all of a state.",
        "deepspeedai/DeepSpeed blogs/deepspeed-offloadpp; docs/_pages/config-json.md (offload_optimizer.ratio)",
    ),
    Rule(
        "offload at stage 0",
        DEEPSPEED,
        "refuse",
        lambda setup: bool(tiers(setup)) and zero_stage(setup) == 0,
        "DeepSpeed offloads the optimizer at stages 1 to 3 only.",
        "Use zero1@cpu or higher.",
        "deepspeedai/DeepSpeed docs/_pages/config-json.md (offload_optimizer)",
    ),
    Rule(
        "offload with another optimizer",
        DEEPSPEED,
        "refuse",
        lambda setup: "optim" in tiers(setup) and setup.optimizer.name not in ("adamw", "adam", "lion", "adagrad"),
        lambda it: f"With offload DeepSpeed wants its own CPU Adam, Lion or Adagrad, not {it.optimizer}.",
        "Use adamw, or set zero_force_ds_cpu_optimizer to false and expect a slow step.",
        "deepspeedai/DeepSpeed deepspeed/runtime/engine.py (zero_force_ds_cpu_optimizer)",
    ),
    Rule(
        "expert layers with ZeRO-3",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.framework.expert_layers and zero_stage(setup) == 3,
        "deepspeed.moe asserts a stage of 2 or lower.",
        "Use zero2 with it, or AutoEP with ZeRO-3.",
        "deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
    ),
    Rule(
        "expert parallelism with hpZ",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.mesh.ep > 1 and setup.plan.row == "hpz",
        "AutoEP with ZeRO-3 excludes ZeRO++'s hpZ and qgZ.",
        "Use zero3.",
        "deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
    ),
    Rule(
        "AutoEP with AutoTP and ZeRO-3",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.mesh.ep > 1 and setup.mesh.tp > 1 and zero_stage(setup) == 3,
        "AutoEP with ZeRO-3 does not combine with AutoTP yet.",
        "Use zero2, or tp 1.",
        "deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.7)",
    ),
    Rule(
        "shard groups without MiCS",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.plan.row in ("hybrid_shard", "hybrid_shard_zero2") and not setup.framework.before(0, 19, 7),
        "DeepSpeed 0.19.7 removed MiCS: it cannot shard states within a group and replicate them over groups.",
        lambda it: f"Use zero3 or hpz, or FSDP2 or Terrazzo for {it.plan}.",
        "deepspeedai/DeepSpeed#8490; deepspeed/runtime/zero/mics.py, in 0.19.6 for the last time",
    ),
    Rule(
        "ring attention",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.mesh.cp > 1,
        "DeepSpeed has no context parallelism by ring attention.",
        "Use Ulysses (sequence_parallel_size), for which heads must divide.",
        "deepspeedai/DeepSpeed deepspeed/sequence (0.19.8)",
    ),
    Rule(
        "every micro-batch all-reduced",
        DEEPSPEED,
        "warn",
        lambda setup: setup.plan.row == "zero2" and setup.micro_batches > 1,
        lambda it: (
            f"DeepSpeed's ZeRO-2 all-reduces whole buckets for each of {it.micro_batches} micro-batches, whatever "
            "reduce_scatter says, and its no_sync raises."
        ),
        "Use zero1 where the gradients fit, which communicates once.",
        "deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py (0.19.8), #5758, #7059",
    ),
    Rule(
        "accumulation in 16 bits",
        DEEPSPEED,
        "warn",
        lambda setup: setup.micro_batches > 1 and zero_stage(setup) >= 2 and _accumulates_narrowly(setup),
        lambda it: (
            f"DeepSpeed's ZeRO-2 and 3 add up {it.micro_batches} micro-batches in 16 bits by default, not in fp32 as "
            "this plan counts."
        ),
        "Set data_types.grad_accum_dtype to fp32, or use larger micro-batches.",
        "deepspeedai/DeepSpeed#2352, #5898",
    ),
    Rule(
        "fp32 accumulation at stage 0",
        DEEPSPEED,
        "refuse",
        lambda setup: zero_stage(setup) == 0 and _accumulates_narrowly(setup),
        "At stage 0 DeepSpeed raises unless gradients are accumulated in the weights' dtype.",
        "Use zero1, which may accumulate in fp32.",
        "deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
    ),
    Rule(
        "Muon in BF16_Optimizer",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.optimizer.name == "muon" and zero_stage(setup) == 1 and _accumulates_narrowly(setup),
        "At stage 1 with fp32 accumulation DeepSpeed hands Muon flat shards, and it would train as plain SGD.",
        "Use zero2 or zero3.",
        "deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.7)",
    ),
    Rule(
        "whole matrices in DeepSpeed's flat shards",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.optimizer.name == "adafactor" and zero_stage(setup) >= 1,
        "ZeRO gives adafactor flat shards instead of matrices, so its rows and columns mean nothing.",
        "Use adamw or lion.",
        "deepspeedai/DeepSpeed deepspeed/runtime/zero (flattened partitions)",
    ),
    Rule(
        "DeepSpeed's fp8",
        DEEPSPEED,
        "refuse",
        lambda setup: setup.matmul == "fp8",
        "DeepSpeed has no fp8 training of its own.",
        "Build the model with TransformerEngine or torchao layers, or use bf16.",
        "deepspeedai/DeepSpeed docs/_pages/config-json.md (0.19.8)",
    ),
    Rule(
        "compiled ZeRO-3",
        DEEPSPEED,
        "warn",
        lambda setup: setup.compile and zero_stage(setup) == 3,
        "torch.compile breaks its graphs at ZeRO-3's hooks on every module.",
        "Use DeepCompile (CUDA), or stage 2.",
        "pytorch/pytorch#115484; deepspeedai/DeepSpeed#6719",
    ),
)

OF_FSDP = (
    Rule(
        "FSDP on NVMe",
        FSDP,
        "refuse",
        lambda setup: on_disk(setup),
        "FSDP has no disk tier.",
        "Use zero3@cpu-all where the host's memory allows it, or DeepSpeed's ZeRO-Infinity.",
        "torch.distributed.fsdp.CPUOffloadPolicy (2.13 to 2.15)",
    ),
    Rule(
        "part of the states offloaded",
        FSDP,
        "refuse",
        lambda setup: not on_disk(setup) and _partly_offloaded(setup),
        lambda it: (
            "FSDP's CPU offload is all or nothing: weights, gradients and optimizer go to the host together, not only "
            f"{it.offloaded}."
        ),
        "Use zero3@cpu-all, or DeepSpeed for the optimizer alone.",
        "torch.distributed.fsdp.CPUOffloadPolicy; pytorch/pytorch#187615",
    ),
    Rule(
        "clipping offloaded gradients",
        FSDP,
        "warn",
        lambda setup: "grad" in tiers(setup) and setup.framework.clip,
        "clip_grad_norm_ on offloaded gradients needs a process group that reduces CPU tensors.",
        "Initialise it with backend cpu:gloo,cuda:nccl.",
        "pytorch/pytorch#148532",
    ),
    Rule(
        "ZeRO-1 or 2 under FSDP2",
        ("fsdp2",),
        "refuse",
        lambda setup: _no_zero_1_or_2(setup),
        lambda it: f"FSDP2 always splits the weights: it has no {it.plan}.",
        "Use shard_grad_op (reshard_after_forward=False), or DDP with ZeroRedundancyOptimizer.",
        "pytorch/pytorch#155952; meta-pytorch/torchtune#2402",
    ),
    Rule(
        "optimizer sharded over replicas",
        DEEPSPEED + FSDP,
        "refuse",
        lambda setup: setup.plan.row == "hfsdp",
        "Neither FSDP's hybrid sharding nor DeepSpeed splits the optimizer over the replicas of a shard group too.",
        "Use hybrid_shard under FSDP, hpz under DeepSpeed, or Megatron-FSDP or Terrazzo for hfsdp.",
        "pytorch/pytorch#148257",
    ),
    Rule(
        "tied weights in two units",
        ("fsdp2",),
        "warn",
        lambda setup: setup.model.tied and zero_stage(setup) == 3 and not setup.framework.before(2, 13),
        lambda it: (
            f"{it.model} ties its head to its embedding; since torch 2.13 fully_shard raises where two units share one."
        ),
        "Leave both to the root module, or pass them as one list to fully_shard.",
        "pytorch/pytorch#176076; huggingface/accelerate#4171",
    ),
    Rule(
        "tied weights trained apart",
        ("fsdp2",),
        "refuse",
        lambda setup: setup.model.tied and zero_stage(setup) == 3 and setup.framework.before(2, 13),
        lambda it: (
            f"{it.model} ties its head to its embedding; before torch 2.13 FSDP2 could leave a rank's part of it "
            "untrained."
        ),
        "Use torch 2.13 or newer and keep both in the root module, or untie them.",
        "pytorch/pytorch#176076",
    ),
    Rule(
        "fp8 gathered in bf16",
        FSDP,
        "warn",
        lambda setup: setup.matmul == "fp8",
        "Weights are gathered in bf16 unless torchao's float8 tensors do it.",
        "Use enable_fsdp_float8_all_gather, and expect less where units are small.",
        "pytorch/torchtitan docs/float8.md, #653",
    ),
    Rule(
        "quantised moments of DTensors",
        ("fsdp2",),
        "warn",
        lambda setup: setup.optimizer.name in ("adamw-8bit", "adamw-4bit"),
        "Quantised optimizers look at the size of the local shard, so their precision depends on the number of ranks.",
        "Use torchao's optimizers, and keep small tensors in fp32 by their global size.",
        "pytorch/ao#4912; bitsandbytes-foundation/bitsandbytes#1633",
    ),
)

OF_OTHERS = (
    Rule(
        "Megatron beyond ZeRO-1",
        MEGATRON,
        "refuse",
        lambda setup: zero_stage(setup) >= 2,
        lambda it: (
            f"Megatron's distributed optimizer splits the optimizer alone (zero1); {it.plan} is stage {it.zero_stage}."
        ),
        "Use zero1, or Megatron-FSDP.",
        "NVIDIA/Megatron-LM docs (dist_optimizer, custom_fsdp)",
    ),
    Rule(
        "Megatron on NVMe",
        MEGATRON,
        "refuse",
        lambda setup: on_disk(setup),
        "Megatron offloads the optimizer to the host, not to disk.",
        "Use zero1@cpu (HybridDeviceOptimizer).",
        "NVIDIA/Megatron-LM megatron/core/optimizer/cpu_offloading",
    ),
    Rule(
        "torchao's offload on several ranks",
        TORCHAO,
        "refuse",
        lambda setup: bool(tiers(setup)) and setup.cluster.count > 1,
        "torchao's CPUOffloadOptimizer is for a single GPU.",
        "Use FSDP2's CPU offload or DeepSpeed's.",
        "pytorch/ao torchao/optim README",
    ),
    Rule(
        "torchao's offload with clipping",
        TORCHAO,
        "refuse",
        lambda setup: bool(tiers(setup)) and setup.framework.clip,
        "torchao's CPUOffloadOptimizer steps while backward runs, before the norm of all gradients is known.",
        "Switch clipping off, or keep the optimizer on the GPU.",
        "pytorch/ao torchao/optim README",
    ),
    Rule(
        "torchao's offloaded gradients with accumulation",
        TORCHAO,
        "refuse",
        lambda setup: "grad" in tiers(setup) and setup.micro_batches > 1,
        lambda it: (
            f"torchao's offload_gradients frees each gradient once it is on the host: {it.micro_batches} "
            "micro-batches are not added up."
        ),
        "Leave gradients on the GPU, or use one micro-batch.",
        "pytorch/ao torchao/optim README",
    ),
)

PEER_RULES = OF_DEEPSPEED + OF_FSDP + OF_OTHERS
