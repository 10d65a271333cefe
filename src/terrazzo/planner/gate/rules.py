"""Combinations that are bad in every framework."""

from __future__ import annotations

import torch

from terrazzo.planner.gate.facts import tiers, zero_stage
from terrazzo.planner.gate.rule import Rule
from terrazzo.planner.memory.tiers import host_writes
from terrazzo.planner.setup.framework import FRAMEWORKS
from terrazzo.planner.setup.setup import Setup

__all__ = ["RULES", "whole_model"]

OTHERS = tuple(name for name in FRAMEWORKS if name != "terrazzo")


def _splits(setup: Setup) -> bool:
    return any(place.axes for place in setup.plan.places().values())


def _splits_nothing(setup: Setup) -> bool:
    return _splits(setup) and setup.mesh.data_ranks == 1 and not tiers(setup)


def whole_model(setup: Setup) -> bool:
    """Whether all weights are gathered at once."""
    one = setup.framework.whole_model_unit or (not setup.model.repeated and setup.model.vocab > 0)
    return one and zero_stage(setup) == 3 and setup.mesh.data_ranks > 1


def _crosses(setup: Setup, group: int) -> bool:
    """Whether `group` neighbouring ranks are on more than one scale-up domain."""
    device = setup.cluster.device
    return (
        device.kind == "cuda" and group > max(device.scaleup_domain, 1) and setup.cluster.count > device.scaleup_domain
    )


def _leaves_cpu_host(setup: Setup) -> bool:
    """Whether ranks of one tp group are on several hosts of CPUs."""
    return setup.cluster.device.kind == "cpu" and setup.mesh.tp > setup.cluster.device.per_node


def _grouped(setup: Setup) -> bool:
    return any({"S", "dp_shard"} & set(place.axes) for place in setup.plan.places().values())


def _gathers_in_pipeline(setup: Setup) -> bool:
    return setup.mesh.pp > 1 and zero_stage(setup) == 3 and setup.mesh.data_ranks > 1 and setup.micro_batches > 1


RULES = (
    Rule(
        name="fp8 without the hardware",
        scope=(),
        severity="refuse",
        applies=lambda setup: setup.matmul == "fp8" and setup.cluster.device.lacks("fp8"),
        reason=lambda it: f"{it.device} has no fp8 matrix units; they came with Ada and Hopper.",
        alternative="Use precision bf16 (fp16 before Ampere).",
        source="NVIDIA H100 and L4 data sheets; the table of devices",
    ),
    Rule(
        name="mxfp8 without the hardware",
        scope=(),
        severity="refuse",
        applies=lambda setup: setup.recipe == "mx" and setup.cluster.device.lacks("mx"),
        reason=lambda it: f"{it.device} has no matrix units for scales of 32 elements; they came with Blackwell.",
        alternative="Use precision fp8 or fp8-rowwise, or bf16.",
        source="NVIDIA Blackwell and AMD CDNA4 white papers; OCP Microscaling Formats specification",
    ),
    Rule(
        name="bf16 without the hardware",
        scope=(),
        severity="warn",
        applies=lambda setup: setup.matmul == "bf16" and setup.cluster.device.lacks("bf16"),
        reason=lambda it: f"{it.device} has no bf16 matrix units: torch emulates bf16 at a fraction of the fp16 rate.",
        alternative="Use precision fp16, which scales the loss.",
        source="NVIDIA V100 and T4 data sheets; torch.cuda.is_bf16_supported(including_emulation=False)",
    ),
    Rule(
        name="fp16 without loss scaling",
        scope=(),
        severity="refuse",
        applies=lambda setup: setup.precision.compute == torch.float16 and setup.precision.loss_scaling is None,
        reason="fp16 gradients below 6e-8 become zero, and nothing scales the loss.",
        alternative="Use precision fp16, which scales it, or bf16.",
        source="arXiv 1710.03740, section 3.2",
    ),
    Rule(
        name="flash attention before Ampere",
        scope=(),
        severity="warn",
        applies=lambda setup: setup.attention != "math" and setup.cluster.device.lacks("bf16"),
        reason=lambda it: (
            f"FlashAttention-2 needs Ampere; on {it.device} torch takes its memory-efficient kernel, which is slower."
        ),
        alternative="Nothing has to change: the memory is the same.",
        source="Dao-AILab/flash-attention README; torch.nn.attention.SDPBackend",
    ),
    Rule(
        name="16-bit master weights",
        scope=(),
        severity="warn",
        applies=lambda setup: (
            setup.precision.master in (torch.bfloat16, torch.float16) and setup.precision.rounding == "nearest"
        ),
        reason="Updates smaller than 1/256 of a weight are lost in 16-bit master weights.",
        alternative=(
            "Use precision bf16, whose master weights are fp32, or precision.rounding remainder, or stochastic with "
            "precision.moments int8."
        ),
        source="arXiv 2010.06192; pytorch/ao torchao/optim README (bf16_stochastic_round)",
    ),
    Rule(
        name="nothing to shard",
        scope=(),
        severity="warn",
        applies=lambda setup: _splits_nothing(setup) and setup.cluster.device.kind != "cpu",
        reason=lambda it: f"{it.plan} splits states over data ranks, but there is only one: nothing is saved.",
        alternative="Use more GPUs, activation checkpointing, a smaller micro-batch, or offload.",
        source="arXiv 1910.02054, table 1 with N = 1",
    ),
    Rule(
        name="nothing to shard on a CPU",
        scope=(),
        severity="warn",
        applies=lambda setup: _splits_nothing(setup) and setup.cluster.device.kind == "cpu",
        reason=lambda it: f"{it.plan} splits states over data ranks, but there is only one: no memory is saved.",
        alternative=(
            "Nothing has to change where it fits; else use activation checkpointing, a smaller micro-batch, offload "
            "to nvme, or more hosts: ranks of one host share its memory."
        ),
        source="arXiv 1910.02054, table 1 with N = 1",
    ),
    Rule(
        name="whole model in one unit",
        scope=OTHERS,
        severity="refuse",
        applies=whole_model,
        reason=lambda it: (
            f"The whole model is one sharding unit: all weights of {it.model} are gathered at once, so the peak is "
            "the whole model again, and nothing can overlap."
        ),
        alternative="Make each transformer block a unit (units= or the wrap policy).",
        source="torch.distributed.fsdp.fully_shard, notes on calling it bottom-up; huggingface/accelerate#1943",
    ),
    Rule(
        name="weights gathered without overlap",
        scope=(),
        severity="warn",
        applies=lambda setup: zero_stage(setup) == 3 and setup.prefetch == 0 and setup.mesh.data_ranks > 1,
        reason="With a prefetch of 0 every gather of weights is waited for.",
        alternative="Use a prefetch of 1; it holds one more unit.",
        source="arXiv 2304.11277, section 3.3",
    ),
    Rule(
        name="split weights in a pipeline",
        scope=(),
        severity="warn",
        applies=lambda setup: _gathers_in_pipeline(setup),
        reason=lambda it: (
            f"{it.plan} gathers a stage's weights again for each of {it.micro_batches} micro-batches, in forward and "
            "in backward."
        ),
        alternative=lambda it: (
            f"Use zero1, or zero2 where its gradients must be split: pp {it.pp} has already divided the weights."
        ),
        source="pytorch/torchtitan docs (reshard_after_forward is off under pipeline parallelism); arXiv 2407.21783",
    ),
    Rule(
        name="zero-bubble schedule elsewhere",
        scope=OTHERS,
        severity="warn",
        applies=lambda setup: setup.mesh.pp > 1 and setup.pipeline == "zero_bubble",
        reason="zero_bubble is ZB-H1 as Terrazzo runs it: waits of a third of 1F1B's are counted.",
        alternative=(
            "Use pipeline 1f1b, which other frameworks run as well, or look up which zero-bubble schedule they have."
        ),
        source="arXiv 2401.10241, section 2.1",
    ),
    Rule(
        name="whole gradients kept under split gradients",
        scope=(),
        severity="warn",
        applies=lambda setup: (
            zero_stage(setup) >= 2
            and setup.accumulate_locally
            and setup.micro_batches > 1
            and setup.mesh.data_ranks > 1
        ),
        reason=lambda it: (
            f"Accumulating locally keeps whole gradients on every rank until the last of {it.micro_batches} "
            f"micro-batches: the memory that {it.plan} saves on gradients is gone."
        ),
        alternative="Reduce every micro-batch, or use zero1, which needs no more.",
        source="meta-pytorch/torchtune#1275; torch FSDPModule.set_requires_gradient_sync",
    ),
    Rule(
        name="tensor parallelism across hosts",
        scope=(),
        severity="warn",
        applies=lambda setup: setup.mesh.tp > 1 and (_crosses(setup, setup.mesh.tp) or _leaves_cpu_host(setup)),
        reason=lambda it: (
            f"tp {it.tp} is wider than the {it.fast_domain} ranks that fast links join: every block waits for the "
            f"network, {it.exchange_time} in each step."
        ),
        alternative=lambda it: f"Use a tp of at most {it.fast_domain}, and pp or more sharding for the rest.",
        source="arXiv 2104.04473, section 3.2 and takeaway 1",
    ),
    Rule(
        name="shard group across hosts",
        scope=(),
        severity="warn",
        applies=lambda setup: _grouped(setup) and _crosses(setup, setup.mesh.shard_ranks * setup.mesh.tp),
        reason=lambda it: (
            f"A shard group of {it.shard_ranks} ranks (dp_shard × cp) reaches over {it.neighbours} neighbouring GPUs "
            f"(with tp), more than the {it.fast_domain} that fast links join, so {it.plan} gathers weights over the "
            "network and saves no traffic."
        ),
        alternative=lambda it: f"Choose dp_replicate so that a shard group stays within {it.fast_domain} GPUs.",
        source="arXiv 2304.11277, section 3.2.2; arXiv 2205.00119",
    ),
    Rule(
        name="states on consumer disks",
        scope=(),
        severity="warn",
        applies=lambda setup: host_writes(setup) > 0,
        reason=lambda it: (
            f"Each step writes {it.written_per_step} to the disks of each host: one drive rated for 600 TB would last "
            f"{it.steps_of_a_drive} steps."
        ),
        alternative="Use drives made for it, more of them, or host memory where it suffices.",
        source="deepspeedai/DeepSpeed (warn_consumer_ssd_writes); every state on disk once in a step, arXiv 2104.07857",
    ),
    Rule(
        name="batch that does not divide",
        scope=OTHERS,
        severity="refuse",
        applies=lambda setup: setup.empty_rows > 0,
        reason=lambda it: f"A global batch of {it.global_batch} does not divide by {it.at_once}.",
        alternative=lambda it: (
            f"Use a global batch of {it.full_batches}, or another micro-batch or number of GPUs; `terrazzo train` "
            "leaves the last rows empty."
        ),
        source=(
            "deepspeedai/DeepSpeed deepspeed/runtime/config.py (_batch_assertion); NVIDIA/Megatron-LM "
            "megatron/core/num_microbatches_calculator.py; pytorch/torchtitan torchtitan/train.py"
        ),
    ),
    Rule(
        name="fewer micro-batches than stages",
        scope=OTHERS,
        severity="warn",
        applies=lambda setup: setup.mesh.pp > 1 and setup.micro_batches < setup.mesh.pp,
        reason=lambda it: (
            f"{it.micro_batches} micro-batches cannot keep {it.pp} pipeline stages busy: the bubble is {it.bubble} of "
            "the work."
        ),
        alternative="Use 4 micro-batches per stage or more.",
        source="arXiv 2104.04473, section 2.2",
    ),
    Rule(
        name="uneven pipeline stages",
        scope=OTHERS,
        severity="warn",
        applies=lambda setup: setup.mesh.pp > 1 and setup.model.layers % (setup.mesh.pp * setup.virtual_stages) > 0,
        reason=lambda it: (
            f"{it.layers} layers do not divide evenly over {it.stages} stages: the others wait for the longest."
        ),
        alternative=lambda it: f"Use a pp, and virtual_stages, whose product divides {it.layers}.",
        source="arXiv 2104.04473, section 2.2",
    ),
    Rule(
        name="tied embeddings in a pipeline",
        scope=(),
        severity="warn",
        applies=lambda setup: setup.mesh.pp > 1 and setup.model.tied,
        reason=lambda it: (
            f"The head of {it.model} is its embedding: the first and the last stage both hold it, and add its "
            "gradients."
        ),
        alternative="Expect one more copy of it with its states, and one more exchange, or untie them.",
        source="NVIDIA/Megatron-LM megatron/core/distributed/finalize_model_grads.py",
    ),
    Rule(
        name="vocabulary does not divide",
        scope=OTHERS,
        severity="warn",
        applies=lambda setup: setup.mesh.tp > 1 and setup.model.vocab % setup.mesh.tp > 0,
        reason=lambda it: (
            f"The vocabulary of {it.vocab} does not divide by tp {it.tp}: it has to be padded to {it.padded_vocab}."
        ),
        alternative="Pad the vocabulary, to a multiple of 128 × tp for speed.",
        source="NVIDIA/Megatron-LM --make-vocab-size-divisible-by",
    ),
    Rule(
        name="beyond the trained positions",
        scope=(),
        severity="warn",
        applies=lambda setup: setup.model.positions is not None and setup.sequence > setup.model.positions,
        reason=lambda it: f"{it.sequence} tokens are more than the {it.positions} positions that {it.model} names.",
        alternative="Scale its rotary positions, or use a shorter sequence.",
        source="arXiv 2309.16039",
    ),
    Rule(
        name="clipping with the optimizer in backward",
        scope=(),
        severity="refuse",
        applies=lambda setup: setup.framework.clip and setup.framework.optimizer_in_backward,
        reason=(
            "Clipping needs the norm of all gradients, but each weight is updated before the others' gradients exist."
        ),
        alternative="Switch clipping off, or step after backward.",
        source="pytorch/torchtune docs (optimizer_in_bwd); pytorch/ao torchao/optim README",
    ),
    Rule(
        name="loss scaling with the optimizer in backward",
        scope=(),
        severity="refuse",
        applies=lambda setup: setup.framework.optimizer_in_backward and setup.precision.loss_scaling is not None,
        reason=(
            "A step with an infinite gradient must be skipped, but each weight is updated before the others' "
            "gradients exist."
        ),
        alternative="Use precision bf16, or step after backward.",
        source="arXiv 1710.03740, section 3.2; pytorch/torchtune docs (optimizer_in_bwd)",
    ),
    Rule(
        name="accumulation with the optimizer in backward",
        scope=OTHERS,
        severity="refuse",
        applies=lambda setup: setup.framework.optimizer_in_backward and setup.micro_batches > 1,
        reason=lambda it: (
            f"Each of {it.micro_batches} micro-batches would update the weights, so nothing is accumulated."
        ),
        alternative="Use one larger micro-batch, or step after backward.",
        source="pytorch/torchtune docs (optimizer_in_bwd)",
    ),
)
