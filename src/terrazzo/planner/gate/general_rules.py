"""Combinations that are bad in every framework."""

from __future__ import annotations

import torch

from terrazzo.planner.gate.facts import split_group, tiers, zero_stage
from terrazzo.planner.gate.rule import RuleBook
from terrazzo.planner.memory.tiers import host_writes
from terrazzo.planner.setup.setup import Setup

__all__ = ["GENERAL_RULES"]

everywhere = RuleBook()


def _splits(setup: Setup) -> bool:
    return any(place.axes for place in setup.plan.places().values())


def _splits_nothing(setup: Setup) -> bool:
    return _splits(setup) and setup.mesh.data_ranks == 1 and not tiers(setup)


def _crosses(setup: Setup, group: int) -> bool:
    """Whether `group` neighbouring ranks are on more than one host, and more than one scale-up domain."""
    return group > setup.cluster.device.near_ranks


def _grouped(setup: Setup) -> bool:
    return any({"S", "dp_shard"} & set(place.axes) for place in setup.plan.places().values())


@everywhere.refuses(
    "fp8 without the hardware",
    reason="{device} has no fp8 matrix units; they came with Ada and Hopper.",
    alternative="Use precision bf16 (fp16 before Ampere).",
    source="NVIDIA H100 and L4 data sheets; the table of devices",
)
def _fp8_without_the_hardware(setup: Setup) -> bool:
    return setup.matmul == "fp8" and setup.cluster.device.lacks("fp8")


@everywhere.refuses(
    "mxfp8 without the hardware",
    reason="{device} has no matrix units for scales of 32 elements; they came with Blackwell.",
    alternative="Use precision fp8 or fp8-rowwise, or bf16.",
    source="NVIDIA Blackwell and AMD CDNA4 white papers; OCP Microscaling Formats specification",
)
def _mxfp8_without_the_hardware(setup: Setup) -> bool:
    return setup.recipe == "mx" and setup.cluster.device.lacks("mx")


@everywhere.warns(
    "bf16 without the hardware",
    reason="{device} has no bf16 matrix units: torch emulates bf16 at a fraction of the fp16 rate.",
    alternative="Use precision fp16, which scales the loss.",
    source="NVIDIA V100 and T4 data sheets; torch.cuda.is_bf16_supported(including_emulation=False)",
)
def _bf16_without_the_hardware(setup: Setup) -> bool:
    return setup.matmul == "bf16" and setup.cluster.device.lacks("bf16")


@everywhere.refuses(
    "fp16 without loss scaling",
    reason="fp16 gradients below 6e-8 become zero, and nothing scales the loss.",
    alternative="Use precision fp16, which scales it, or bf16.",
    source="arXiv 1710.03740, section 3.2",
)
def _fp16_without_loss_scaling(setup: Setup) -> bool:
    return setup.precision.compute == torch.float16 and setup.precision.loss_scaling is None


@everywhere.warns(
    "flash attention before Ampere",
    reason="FlashAttention-2 needs Ampere; on {device} torch takes its memory-efficient kernel, which is slower.",
    alternative="Nothing has to change: the memory is the same.",
    source="Dao-AILab/flash-attention README; torch.nn.attention.SDPBackend",
)
def _flash_attention_before_ampere(setup: Setup) -> bool:
    return not setup.keeps_scores and setup.cluster.device.lacks("bf16")


@everywhere.warns(
    "16-bit master weights",
    reason="Updates smaller than 1/256 of a weight are lost in 16-bit master weights.",
    alternative=(
        "Use precision bf16, whose master weights are fp32, or precision.rounding remainder, or stochastic with "
        "precision.moments int8."
    ),
    source="arXiv 2010.06192; pytorch/ao torchao/optim README (bf16_stochastic_round)",
)
def _16_bit_master_weights(setup: Setup) -> bool:
    return setup.precision.master in (torch.bfloat16, torch.float16) and setup.precision.rounding == "nearest"


@everywhere.warns(
    "nothing to shard",
    reason="{plan} splits states over data ranks, but there is only one: nothing is saved.",
    alternative="Use more GPUs, activation checkpointing, a smaller micro-batch, or offload.",
    source="arXiv 1910.02054, table 1 with N = 1",
)
def _nothing_to_shard(setup: Setup) -> bool:
    return _splits_nothing(setup) and setup.cluster.device.kind != "cpu"


@everywhere.warns(
    "nothing to shard on a CPU",
    reason="{plan} splits states over data ranks, but there is only one: no memory is saved.",
    alternative=(
        "Nothing has to change where it fits; else use activation checkpointing, a smaller micro-batch, offload to "
        "nvme, or more hosts: ranks of one host share its memory."
    ),
    source="arXiv 1910.02054, table 1 with N = 1",
)
def _nothing_to_shard_on_a_cpu(setup: Setup) -> bool:
    return _splits_nothing(setup) and setup.cluster.device.kind == "cpu"


@everywhere.warns(
    "weights gathered without overlap",
    reason="With a prefetch of 0 every gather of weights is waited for.",
    alternative="Use a prefetch of 1; it holds one more unit.",
    source="arXiv 2304.11277, section 3.3",
)
def _weights_gathered_without_overlap(setup: Setup) -> bool:
    return zero_stage(setup) == 3 and setup.prefetch == 0 and setup.mesh.data_ranks > 1


@everywhere.warns(
    "split weights in a pipeline",
    reason=(
        "{plan} gathers a stage's weights again for each of {micro_batches} micro-batches, in forward and in backward."
    ),
    alternative="Use zero1, or zero2 where its gradients must be split: pp {pp} has already divided the weights.",
    source="pytorch/torchtitan docs (reshard_after_forward is off under pipeline parallelism); arXiv 2407.21783",
)
def _gathers_in_pipeline(setup: Setup) -> bool:
    return setup.mesh.pp > 1 and zero_stage(setup) == 3 and setup.mesh.data_ranks > 1 and setup.micro_batches > 1


@everywhere.warns(
    "whole gradients kept under split gradients",
    reason=(
        "Accumulating locally keeps whole gradients on every rank until the last of {micro_batches} micro-batches: "
        "the memory that {plan} saves on gradients is gone."
    ),
    alternative="Reduce every micro-batch, or use zero1, which needs no more.",
    source="meta-pytorch/torchtune#1275; torch FSDPModule.set_requires_gradient_sync",
)
def _whole_gradients_kept_under_split_gradients(setup: Setup) -> bool:
    return zero_stage(setup) >= 2 and setup.accumulate_locally and setup.micro_batches > 1 and setup.mesh.data_ranks > 1


@everywhere.warns(
    "tensor parallelism across hosts",
    reason=(
        "tp {tp} is wider than the {host_ranks} ranks that reach each other without the network: every block waits "
        "for the network, {exchange_time} in each step."
    ),
    alternative="Use a tp of at most {host_ranks}, and pp or more sharding for the rest.",
    source="arXiv 2104.04473, section 3.2 and takeaway 1",
)
def _tensor_parallelism_across_hosts(setup: Setup) -> bool:
    return _crosses(setup, setup.mesh.tp)


@everywhere.warns(
    "shard group across hosts",
    reason=(
        "A shard group of {shard_ranks} ranks (dp_shard × cp) reaches over {neighbours} neighbouring GPUs (with tp), "
        "more than the {host_ranks} that reach each other without the network, so {plan} gathers weights over the "
        "network and saves no traffic."
    ),
    alternative="Choose dp_replicate so that a shard group stays within {host_ranks} GPUs.",
    source="arXiv 2304.11277, section 3.2.2; arXiv 2205.00119",
)
def _shard_group_across_hosts(setup: Setup) -> bool:
    return _grouped(setup) and _crosses(setup, setup.mesh.shard_ranks * setup.mesh.tp)


@everywhere.warns(
    "groups across the edge of a host",
    reason=(
        "Groups of {split.size} ranks along {split.axis} would fit in {host}s of {host_ranks}, but the next ones begin "
        "{split.span} ranks further on: some lie across two {host}s, and all wait for these."
    ),
    alternative="{unsplit}",
    source="NVIDIA/nccl src/graph: rings cross from node to node; torch.distributed.device_mesh: ranks row by row",
)
def _groups_across_the_edge_of_a_host(setup: Setup) -> bool:
    return split_group(setup) is not None


@everywhere.warns(
    "host that is not full",
    reason=(
        "{gpus} GPUs in {host}s of {host_ranks} leave {last_host} in the last one: a ring over all {host}s leaves that "
        "one through the network cards of {last_host}, and is no faster anywhere."
    ),
    alternative="{full_hosts}",
    source="NVIDIA/nccl src/graph: rings cross from node to node; stas00/ml-engineering, network/README.md",
)
def _host_that_is_not_full(setup: Setup) -> bool:
    device, count = setup.cluster.device, setup.cluster.count
    return device.kind == "cuda" and count > device.near_ranks and count % device.near_ranks > 0


@everywhere.warns(
    "states on consumer disks",
    reason=(
        "Each step writes {written_per_step} to the disks of each host: one drive rated for 600 TB would last "
        "{steps_of_a_drive} steps."
    ),
    alternative="Use drives made for it, more of them, or host memory where it suffices.",
    source=("deepspeedai/DeepSpeed (warn_consumer_ssd_writes); every state on disk once in a step, arXiv 2104.07857"),
)
def _states_on_consumer_disks(setup: Setup) -> bool:
    return host_writes(setup) > 0


@everywhere.warns(
    "tied embeddings in a pipeline",
    reason="The head of {model} is its embedding: the first and the last stage both hold it, and add its gradients.",
    alternative="Expect one more copy of it with its states, and one more exchange, or untie them.",
    source="NVIDIA/Megatron-LM megatron/core/distributed/finalize_model_grads.py",
)
def _tied_embeddings_in_a_pipeline(setup: Setup) -> bool:
    return setup.mesh.pp > 1 and setup.model.tied


@everywhere.warns(
    "beyond the trained positions",
    reason="{sequence} tokens are more than the {positions} positions that {model} names.",
    alternative="Scale its rotary positions, or use a shorter sequence.",
    source="arXiv 2309.16039",
)
def _beyond_the_trained_positions(setup: Setup) -> bool:
    return setup.model.positions is not None and setup.sequence > setup.model.positions


@everywhere.refuses(
    "clipping with the optimizer in backward",
    reason="Clipping needs the norm of all gradients, but each weight is updated before the others' gradients exist.",
    alternative="Switch clipping off, or step after backward.",
    source="pytorch/torchtune docs (optimizer_in_bwd); pytorch/ao torchao/optim README",
)
def _clipping_with_the_optimizer_in_backward(setup: Setup) -> bool:
    return setup.framework.clip and setup.framework.optimizer_in_backward


@everywhere.refuses(
    "loss scaling with the optimizer in backward",
    reason=(
        "A step with an infinite gradient must be skipped, but each weight is updated before the others' gradients "
        "exist."
    ),
    alternative="Use precision bf16, or step after backward.",
    source="arXiv 1710.03740, section 3.2; pytorch/torchtune docs (optimizer_in_bwd)",
)
def _loss_scaling_with_the_optimizer_in_backward(setup: Setup) -> bool:
    return setup.framework.optimizer_in_backward and setup.precision.loss_scaling is not None


GENERAL_RULES = everywhere.rules
