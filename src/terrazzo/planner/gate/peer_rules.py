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
        name="AutoTP with ZeRO-3",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: setup.mesh.tp > 1 and zero_stage(setup) == 3 and setup.framework.before(0, 19, 4),
        reason="Before DeepSpeed 0.19.4, AutoTP trains with ZeRO stages 0 to 2 only.",
        alternative="Use stage 2, or DeepSpeed 0.19.4 or newer.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py: an assertion in 0.19.3, gone in 0.19.4; #8168",
    ),
    Rule(
        name="young AutoTP with ZeRO-3",
        scope=DEEPSPEED,
        severity="warn",
        applies=lambda setup: setup.mesh.tp > 1 and zero_stage(setup) == 3 and not setup.framework.before(0, 19, 4),
        reason="AutoTP with ZeRO-3 came with DeepSpeed 0.19.4; its tutorial still names stages 0 to 2.",
        alternative="Compare losses with stage 2 before a long run.",
        source="deepspeedai/DeepSpeed #8167, #8168; docs/_tutorials/autotp-training.md",
    ),
    Rule(
        name="AutoTP in a pipeline",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: setup.mesh.tp > 1 and setup.mesh.pp > 1,
        reason="DeepSpeed's AutoTP does not combine with its pipeline engine.",
        alternative="Use AutoTP with ZeRO, or Megatron's tensor parallelism under the pipeline.",
        source="deepspeedai/DeepSpeed#7147",
    ),
    Rule(
        name="PipelineModule with ZeRO-2 or 3",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: setup.mesh.pp > 1 and zero_stage(setup) >= 2,
        reason=lambda it: (
            f"DeepSpeed's PipelineEngine asserts a ZeRO stage below 2; {it.plan} is stage {it.zero_stage}."
        ),
        alternative="Use zero1 with the pipeline, or stage 3 without it.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/pipe/engine.py (0.19.7), #1110",
    ),
    Rule(
        name="weights offloaded below ZeRO-3",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: "weight" in tiers(setup) and zero_stage(setup) < 3,
        reason=(
            "Below stage 3 DeepSpeed accepts offload_param and ignores it without a word: the weights stay on the GPU."
        ),
        alternative="Use zero3, or offload the optimizer alone.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
    ),
    Rule(
        name="NVMe below ZeRO-3",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: on_disk(setup, "optim") and zero_stage(setup) < 3,
        reason="Below stage 3 DeepSpeed treats nvme as cpu without a word: the host must hold it all.",
        alternative="Use zero3@nvme, or ask for cpu and count the host's memory.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py (0.19.8)",
    ),
    Rule(
        name="offload in shares",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: (
            in_shares(setup) and (zero_stage(setup) < 3 or on_disk(setup) or set(tiers(setup)) != _OPTIMIZER)
        ),
        reason=lambda it: (
            "DeepSpeed offloads a share of the optimizer alone (`ratio`, Twin-Flow), from ZeRO-3 to the CPU, not "
            f"{it.offloaded}."
        ),
        alternative="Use zero3 and offload a share of the optimizer, or all of a state.",
        source="deepspeedai/DeepSpeed blogs/deepspeed-offloadpp; docs/_pages/config-json.md (offload_optimizer.ratio)",
    ),
    Rule(
        name="offload at stage 0",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: bool(tiers(setup)) and zero_stage(setup) == 0,
        reason="DeepSpeed offloads the optimizer at stages 1 to 3 only.",
        alternative="Use zero1@cpu or higher.",
        source="deepspeedai/DeepSpeed docs/_pages/config-json.md (offload_optimizer)",
    ),
    Rule(
        name="offload with another optimizer",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: (
            "optim" in tiers(setup) and setup.optimizer.name not in ("adamw", "adam", "lion", "adagrad")
        ),
        reason=lambda it: f"With offload DeepSpeed wants its own CPU Adam, Lion or Adagrad, not {it.optimizer}.",
        alternative="Use adamw, or set zero_force_ds_cpu_optimizer to false and expect a slow step.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (zero_force_ds_cpu_optimizer)",
    ),
    Rule(
        name="expert layers with ZeRO-3",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: setup.framework.expert_layers and zero_stage(setup) == 3,
        reason="deepspeed.moe asserts a stage of 2 or lower.",
        alternative="Use zero2 with it, or AutoEP with ZeRO-3.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
    ),
    Rule(
        name="expert parallelism with hpZ",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: setup.mesh.ep > 1 and setup.plan.row == "hpz",
        reason="AutoEP with ZeRO-3 excludes ZeRO++'s hpZ and qgZ.",
        alternative="Use zero3.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
    ),
    Rule(
        name="AutoEP with AutoTP and ZeRO-3",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: setup.mesh.ep > 1 and setup.mesh.tp > 1 and zero_stage(setup) == 3,
        reason="AutoEP with ZeRO-3 does not combine with AutoTP yet.",
        alternative="Use zero2, or tp 1.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.7)",
    ),
    Rule(
        name="shard groups without MiCS",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: (
            setup.plan.row in ("hybrid_shard", "hybrid_shard_zero2") and not setup.framework.before(0, 19, 7)
        ),
        reason="DeepSpeed 0.19.7 removed MiCS: it cannot shard states within a group and replicate them over groups.",
        alternative=lambda it: f"Use zero3 or hpz, or FSDP2 or Terrazzo for {it.plan}.",
        source="deepspeedai/DeepSpeed#8490; deepspeed/runtime/zero/mics.py, in 0.19.6 for the last time",
    ),
    Rule(
        name="ring attention",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: setup.mesh.cp > 1 and setup.context != "ulysses",
        reason="DeepSpeed has no context parallelism by ring attention.",
        alternative="Use Ulysses (sequence_parallel_size), for which heads must divide.",
        source="deepspeedai/DeepSpeed deepspeed/sequence (0.19.8)",
    ),
    Rule(
        name="every micro-batch all-reduced",
        scope=DEEPSPEED,
        severity="warn",
        applies=lambda setup: setup.plan.row == "zero2" and setup.micro_batches > 1,
        reason=lambda it: (
            f"DeepSpeed's ZeRO-2 all-reduces whole buckets for each of {it.micro_batches} micro-batches, whatever "
            "reduce_scatter says, and its no_sync raises."
        ),
        alternative="Use zero1 where the gradients fit, which communicates once.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py (0.19.8), #5758, #7059",
    ),
    Rule(
        name="accumulation in 16 bits",
        scope=DEEPSPEED,
        severity="warn",
        applies=lambda setup: setup.micro_batches > 1 and zero_stage(setup) >= 2 and _accumulates_narrowly(setup),
        reason=lambda it: (
            f"DeepSpeed's ZeRO-2 and 3 add up {it.micro_batches} micro-batches in 16 bits by default, not in fp32 as "
            "this plan counts."
        ),
        alternative="Set data_types.grad_accum_dtype to fp32, or use larger micro-batches.",
        source="deepspeedai/DeepSpeed#2352, #5898",
    ),
    Rule(
        name="fp32 accumulation at stage 0",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: zero_stage(setup) == 0 and _accumulates_narrowly(setup),
        reason="At stage 0 DeepSpeed raises unless gradients are accumulated in the weights' dtype.",
        alternative="Use zero1, which may accumulate in fp32.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
    ),
    Rule(
        name="Muon in BF16_Optimizer",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: (
            setup.optimizer.name == "muon" and zero_stage(setup) == 1 and _accumulates_narrowly(setup)
        ),
        reason="At stage 1 with fp32 accumulation DeepSpeed hands Muon flat shards, and it would train as plain SGD.",
        alternative="Use zero2 or zero3.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.7)",
    ),
    Rule(
        name="whole matrices in DeepSpeed's flat shards",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: setup.optimizer.name == "adafactor" and zero_stage(setup) >= 1,
        reason="ZeRO gives adafactor flat shards instead of matrices, so its rows and columns mean nothing.",
        alternative="Use adamw or lion.",
        source="deepspeedai/DeepSpeed deepspeed/runtime/zero (flattened partitions)",
    ),
    Rule(
        name="DeepSpeed's fp8",
        scope=DEEPSPEED,
        severity="refuse",
        applies=lambda setup: setup.matmul == "fp8",
        reason="DeepSpeed has no fp8 training of its own.",
        alternative="Build the model with TransformerEngine or torchao layers, or use bf16.",
        source="deepspeedai/DeepSpeed docs/_pages/config-json.md (0.19.8)",
    ),
    Rule(
        name="compiled ZeRO-3",
        scope=DEEPSPEED,
        severity="warn",
        applies=lambda setup: setup.compile and zero_stage(setup) == 3,
        reason="torch.compile breaks its graphs at ZeRO-3's hooks on every module.",
        alternative="Use DeepCompile (CUDA), or stage 2.",
        source="pytorch/pytorch#115484; deepspeedai/DeepSpeed#6719",
    ),
)

OF_FSDP = (
    Rule(
        name="FSDP on NVMe",
        scope=FSDP,
        severity="refuse",
        applies=lambda setup: on_disk(setup),
        reason="FSDP has no disk tier.",
        alternative="Use zero3@cpu-all where the host's memory allows it, or DeepSpeed's ZeRO-Infinity.",
        source="torch.distributed.fsdp.CPUOffloadPolicy (2.13 to 2.15)",
    ),
    Rule(
        name="part of the states offloaded",
        scope=FSDP,
        severity="refuse",
        applies=lambda setup: not on_disk(setup) and _partly_offloaded(setup),
        reason=lambda it: (
            "FSDP's CPU offload is all or nothing: weights, gradients and optimizer go to the host together, not only "
            f"{it.offloaded}."
        ),
        alternative="Use zero3@cpu-all, or DeepSpeed for the optimizer alone.",
        source="torch.distributed.fsdp.CPUOffloadPolicy; pytorch/pytorch#187615",
    ),
    Rule(
        name="clipping offloaded gradients",
        scope=FSDP,
        severity="warn",
        applies=lambda setup: "grad" in tiers(setup) and setup.framework.clip,
        reason="clip_grad_norm_ on offloaded gradients needs a process group that reduces CPU tensors.",
        alternative="Initialise it with backend cpu:gloo,cuda:nccl.",
        source="pytorch/pytorch#148532",
    ),
    Rule(
        name="ZeRO-1 or 2 under FSDP2",
        scope=("fsdp2",),
        severity="refuse",
        applies=lambda setup: _no_zero_1_or_2(setup),
        reason=lambda it: f"FSDP2 always splits the weights: it has no {it.plan}.",
        alternative="Use shard_grad_op (reshard_after_forward=False), or DDP with ZeroRedundancyOptimizer.",
        source="pytorch/pytorch#155952; meta-pytorch/torchtune#2402",
    ),
    Rule(
        name="optimizer sharded over replicas",
        scope=DEEPSPEED + FSDP,
        severity="refuse",
        applies=lambda setup: setup.plan.row == "hfsdp",
        reason=(
            "Neither FSDP's hybrid sharding nor DeepSpeed splits the optimizer over the replicas of a shard group too."
        ),
        alternative="Use hybrid_shard under FSDP, hpz under DeepSpeed, or Megatron-FSDP or Terrazzo for hfsdp.",
        source="pytorch/pytorch#148257",
    ),
    Rule(
        name="tied weights in two units",
        scope=("fsdp2",),
        severity="warn",
        applies=lambda setup: setup.model.tied and zero_stage(setup) == 3 and not setup.framework.before(2, 13),
        reason=lambda it: (
            f"{it.model} ties its head to its embedding; since torch 2.13 fully_shard raises where two units share one."
        ),
        alternative="Leave both to the root module, or pass them as one list to fully_shard.",
        source="pytorch/pytorch#176076; huggingface/accelerate#4171",
    ),
    Rule(
        name="tied weights trained apart",
        scope=("fsdp2",),
        severity="refuse",
        applies=lambda setup: setup.model.tied and zero_stage(setup) == 3 and setup.framework.before(2, 13),
        reason=lambda it: (
            f"{it.model} ties its head to its embedding; before torch 2.13 FSDP2 could leave a rank's part of it "
            "untrained."
        ),
        alternative="Use torch 2.13 or newer and keep both in the root module, or untie them.",
        source="pytorch/pytorch#176076",
    ),
    Rule(
        name="fp8 gathered in bf16",
        scope=FSDP,
        severity="warn",
        applies=lambda setup: setup.matmul == "fp8",
        reason="Weights are gathered in bf16 unless torchao's float8 tensors do it.",
        alternative="Use enable_fsdp_float8_all_gather, and expect less where units are small.",
        source="pytorch/torchtitan docs/float8.md, #653",
    ),
    Rule(
        name="quantised moments of DTensors",
        scope=("fsdp2",),
        severity="warn",
        applies=lambda setup: setup.optimizer.name in ("adamw-8bit", "adamw-4bit"),
        reason=(
            "Quantised optimizers look at the size of the local shard, so their precision depends on the number of "
            "ranks."
        ),
        alternative="Use torchao's optimizers, and keep small tensors in fp32 by their global size.",
        source="pytorch/ao#4912; bitsandbytes-foundation/bitsandbytes#1633",
    ),
)

OF_OTHERS = (
    Rule(
        name="Megatron beyond ZeRO-1",
        scope=MEGATRON,
        severity="refuse",
        applies=lambda setup: zero_stage(setup) >= 2,
        reason=lambda it: (
            f"Megatron's distributed optimizer splits the optimizer alone (zero1); {it.plan} is stage {it.zero_stage}."
        ),
        alternative="Use zero1, or Megatron-FSDP.",
        source="NVIDIA/Megatron-LM docs (dist_optimizer, custom_fsdp)",
    ),
    Rule(
        name="Megatron on NVMe",
        scope=MEGATRON,
        severity="refuse",
        applies=lambda setup: on_disk(setup),
        reason="Megatron offloads the optimizer to the host, not to disk.",
        alternative="Use zero1@cpu (HybridDeviceOptimizer).",
        source="NVIDIA/Megatron-LM megatron/core/optimizer/cpu_offloading",
    ),
    Rule(
        name="torchao's offload on several ranks",
        scope=TORCHAO,
        severity="refuse",
        applies=lambda setup: bool(tiers(setup)) and setup.cluster.count > 1,
        reason="torchao's CPUOffloadOptimizer is for a single GPU.",
        alternative="Use FSDP2's CPU offload or DeepSpeed's.",
        source="pytorch/ao torchao/optim README",
    ),
    Rule(
        name="torchao's offload with clipping",
        scope=TORCHAO,
        severity="refuse",
        applies=lambda setup: bool(tiers(setup)) and setup.framework.clip,
        reason="torchao's CPUOffloadOptimizer steps while backward runs, before the norm of all gradients is known.",
        alternative="Switch clipping off, or keep the optimizer on the GPU.",
        source="pytorch/ao torchao/optim README",
    ),
    Rule(
        name="torchao's offloaded gradients with accumulation",
        scope=TORCHAO,
        severity="refuse",
        applies=lambda setup: "grad" in tiers(setup) and setup.micro_batches > 1,
        reason=lambda it: (
            f"torchao's offload_gradients frees each gradient once it is on the host: {it.micro_batches} "
            "micro-batches are not added up."
        ),
        alternative="Leave gradients on the GPU, or use one micro-batch.",
        source="pytorch/ao torchao/optim README",
    ),
)

PEER_RULES = OF_DEEPSPEED + OF_FSDP + OF_OTHERS
