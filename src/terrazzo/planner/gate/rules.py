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
    one = setup.framework.whole_model_unit or (not setup.model.blocks and setup.model.vocab > 0)
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
        "fp8 without the hardware",
        (),
        "refuse",
        lambda setup: setup.matmul == "fp8" and setup.cluster.device.lacks("fp8"),
        lambda it: f"{it.device} has no fp8 matrix units; they came with Ada and Hopper.",
        "Use precision bf16 (fp16 before Ampere).",
        "NVIDIA H100 and L4 data sheets; the table of devices",
    ),
    Rule(
        "bf16 without the hardware",
        (),
        "warn",
        lambda setup: setup.matmul == "bf16" and setup.cluster.device.lacks("bf16"),
        lambda it: f"{it.device} has no bf16 matrix units: torch emulates bf16 at a fraction of the fp16 rate.",
        "Use precision fp16, which scales the loss.",
        "NVIDIA V100 and T4 data sheets; torch.cuda.is_bf16_supported(including_emulation=False)",
    ),
    Rule(
        "fp16 without loss scaling",
        (),
        "refuse",
        lambda setup: setup.precision.compute == torch.float16 and setup.precision.loss_scaling is None,
        "fp16 gradients below 6e-8 become zero, and nothing scales the loss.",
        "Use precision fp16, which scales it, or bf16.",
        "arXiv 1710.03740, section 3.2",
    ),
    Rule(
        "flash attention before Ampere",
        (),
        "warn",
        lambda setup: setup.attention != "math" and setup.cluster.device.lacks("bf16"),
        lambda it: (
            f"FlashAttention-2 needs Ampere; on {it.device} torch takes its memory-efficient kernel, which is slower."
        ),
        "Nothing has to change: the memory is the same.",
        "Dao-AILab/flash-attention README; torch.nn.attention.SDPBackend",
    ),
    Rule(
        "16-bit master weights",
        (),
        "warn",
        lambda setup: setup.precision.master in (torch.bfloat16, torch.float16) and not setup.precision.stochastic,
        "Updates smaller than 1/256 of a weight are lost in 16-bit master weights.",
        "Use precision bf16, whose master weights are fp32, or an optimizer that rounds stochastically.",
        "arXiv 2010.06192; pytorch/ao torchao/optim README (bf16_stochastic_round)",
    ),
    Rule(
        "nothing to shard",
        (),
        "warn",
        lambda setup: _splits_nothing(setup) and setup.cluster.device.kind != "cpu",
        lambda it: f"{it.plan} splits states over data ranks, but there is only one: nothing is saved.",
        "Use more GPUs, activation checkpointing, a smaller micro-batch, or offload.",
        "arXiv 1910.02054, table 1 with N = 1",
    ),
    Rule(
        "nothing to shard on a CPU",
        (),
        "warn",
        lambda setup: _splits_nothing(setup) and setup.cluster.device.kind == "cpu",
        lambda it: f"{it.plan} splits states over data ranks, but there is only one: no memory is saved.",
        "Nothing has to change where it fits; else use activation checkpointing, a smaller micro-batch, offload to "
        "nvme, or more hosts: ranks of one host share its memory.",
        "arXiv 1910.02054, table 1 with N = 1",
    ),
    Rule(
        "whole model in one unit",
        OTHERS,
        "refuse",
        whole_model,
        lambda it: (
            f"The whole model is one sharding unit: all weights of {it.model} are gathered at once, so the peak is "
            "the whole model again, and nothing can overlap."
        ),
        "Make each transformer block a unit (units= or the wrap policy).",
        "torch.distributed.fsdp.fully_shard, notes on calling it bottom-up; huggingface/accelerate#1943",
    ),
    Rule(
        "weights gathered without overlap",
        (),
        "warn",
        lambda setup: zero_stage(setup) == 3 and setup.prefetch == 0 and setup.mesh.data_ranks > 1,
        "With a prefetch of 0 every gather of weights is waited for.",
        "Use a prefetch of 1; it holds one more unit.",
        "arXiv 2304.11277, section 3.3",
    ),
    Rule(
        "split weights in a pipeline",
        (),
        "warn",
        lambda setup: _gathers_in_pipeline(setup),
        lambda it: (
            f"{it.plan} gathers a stage's weights again for each of {it.micro_batches} micro-batches, in forward and "
            "in backward."
        ),
        lambda it: (
            f"Use zero1, or zero2 where its gradients must be split: pp {it.pp} has already divided the weights."
        ),
        "pytorch/torchtitan docs (reshard_after_forward is off under pipeline parallelism); arXiv 2407.21783",
    ),
    Rule(
        "zero-bubble schedule elsewhere",
        OTHERS,
        "warn",
        lambda setup: setup.mesh.pp > 1 and setup.pipeline == "zero_bubble",
        "zero_bubble is ZB-H1 as Terrazzo runs it: waits of a third of 1F1B's are counted.",
        "Use pipeline 1f1b, which other frameworks run as well, or look up which zero-bubble schedule they have.",
        "arXiv 2401.10241, section 2.1",
    ),
    Rule(
        "whole gradients kept under split gradients",
        (),
        "warn",
        lambda setup: (
            zero_stage(setup) >= 2
            and setup.accumulate_locally
            and setup.micro_batches > 1
            and setup.mesh.data_ranks > 1
        ),
        lambda it: (
            f"Accumulating locally keeps whole gradients on every rank until the last of {it.micro_batches} "
            f"micro-batches: the memory that {it.plan} saves on gradients is gone."
        ),
        "Reduce every micro-batch, or use zero1, which needs no more.",
        "meta-pytorch/torchtune#1275; torch FSDPModule.set_requires_gradient_sync",
    ),
    Rule(
        "tensor parallelism across hosts",
        (),
        "warn",
        lambda setup: setup.mesh.tp > 1 and (_crosses(setup, setup.mesh.tp) or _leaves_cpu_host(setup)),
        lambda it: (
            f"tp {it.tp} is wider than the {it.fast_domain} ranks that fast links join: every block waits for the "
            f"network, {it.exchange_time} in each step."
        ),
        lambda it: f"Use a tp of at most {it.fast_domain}, and pp or more sharding for the rest.",
        "arXiv 2104.04473, section 3.2 and takeaway 1",
    ),
    Rule(
        "shard group across hosts",
        (),
        "warn",
        lambda setup: _grouped(setup) and _crosses(setup, setup.mesh.shard_ranks * setup.mesh.tp),
        lambda it: (
            f"A shard group of {it.shard_ranks} ranks (dp_shard × cp) reaches over {it.neighbours} neighbouring GPUs "
            f"(with tp), more than the {it.fast_domain} that fast links join, so {it.plan} gathers weights over the "
            "network and saves no traffic."
        ),
        lambda it: f"Choose dp_replicate so that a shard group stays within {it.fast_domain} GPUs.",
        "arXiv 2304.11277, section 3.2.2; arXiv 2205.00119",
    ),
    Rule(
        "states on consumer disks",
        (),
        "warn",
        lambda setup: host_writes(setup) > 0,
        lambda it: (
            f"Each step writes {it.written_per_step} to the disks of each host: one drive rated for 600 TB would last "
            f"{it.steps_of_a_drive} steps."
        ),
        "Use drives made for it, more of them, or host memory where it suffices.",
        "deepspeedai/DeepSpeed (warn_consumer_ssd_writes); every state on disk once in a step, arXiv 2104.07857",
    ),
    Rule(
        "fewer micro-batches than stages",
        OTHERS,
        "warn",
        lambda setup: setup.mesh.pp > 1 and setup.micro_batches < setup.mesh.pp,
        lambda it: (
            f"{it.micro_batches} micro-batches cannot keep {it.pp} pipeline stages busy: the bubble is {it.bubble} of "
            "the work."
        ),
        "Use 4 micro-batches per stage or more.",
        "arXiv 2104.04473, section 2.2",
    ),
    Rule(
        "uneven pipeline stages",
        OTHERS,
        "warn",
        lambda setup: setup.mesh.pp > 1 and setup.model.layers % (setup.mesh.pp * setup.virtual_stages) > 0,
        lambda it: f"{it.layers} layers do not divide evenly over {it.stages} stages: the others wait for the longest.",
        lambda it: f"Use a pp, and virtual_stages, whose product divides {it.layers}.",
        "arXiv 2104.04473, section 2.2",
    ),
    Rule(
        "tied embeddings in a pipeline",
        (),
        "warn",
        lambda setup: setup.mesh.pp > 1 and setup.model.tied,
        lambda it: (
            f"The head of {it.model} is its embedding: the first and the last stage both hold it, and add its "
            "gradients."
        ),
        "Expect one more copy of it with its states, and one more exchange, or untie them.",
        "NVIDIA/Megatron-LM megatron/core/distributed/finalize_model_grads.py",
    ),
    Rule(
        "vocabulary does not divide",
        OTHERS,
        "warn",
        lambda setup: setup.mesh.tp > 1 and setup.model.vocab % setup.mesh.tp > 0,
        lambda it: (
            f"The vocabulary of {it.vocab} does not divide by tp {it.tp}: it has to be padded to {it.padded_vocab}."
        ),
        "Pad the vocabulary, to a multiple of 128 × tp for speed.",
        "NVIDIA/Megatron-LM --make-vocab-size-divisible-by",
    ),
    Rule(
        "beyond the trained positions",
        (),
        "warn",
        lambda setup: setup.model.positions is not None and setup.sequence > setup.model.positions,
        lambda it: f"{it.sequence} tokens are more than the {it.positions} positions that {it.model} names.",
        "Scale its rotary positions, or use a shorter sequence.",
        "arXiv 2309.16039",
    ),
    Rule(
        "clipping with the optimizer in backward",
        (),
        "refuse",
        lambda setup: setup.framework.clip and setup.framework.optimizer_in_backward,
        "Clipping needs the norm of all gradients, but each weight is updated before the others' gradients exist.",
        "Switch clipping off, or step after backward.",
        "pytorch/torchtune docs (optimizer_in_bwd); pytorch/ao torchao/optim README",
    ),
    Rule(
        "loss scaling with the optimizer in backward",
        (),
        "refuse",
        lambda setup: setup.framework.optimizer_in_backward and setup.precision.loss_scaling is not None,
        "A step with an infinite gradient must be skipped, but each weight is updated before the others' gradients "
        "exist.",
        "Use precision bf16, or step after backward.",
        "arXiv 1710.03740, section 3.2; pytorch/torchtune docs (optimizer_in_bwd)",
    ),
    Rule(
        "accumulation with the optimizer in backward",
        OTHERS,
        "refuse",
        lambda setup: setup.framework.optimizer_in_backward and setup.micro_batches > 1,
        lambda it: f"Each of {it.micro_batches} micro-batches would update the weights, so nothing is accumulated.",
        "Use one larger micro-batch, or step after backward.",
        "pytorch/torchtune docs (optimizer_in_bwd)",
    ),
)
