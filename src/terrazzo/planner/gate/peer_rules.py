"""What other frameworks refuse, ignore, or run otherwise than asked, in the versions that sources name."""

from __future__ import annotations

from terrazzo.planner.gate.facts import in_shares, on_disk, tiers, whole_model, zero_stage
from terrazzo.planner.gate.rule import RuleBook
from terrazzo.planner.setup.framework import FRAMEWORKS
from terrazzo.planner.setup.setup import Setup

__all__ = ["PEER_RULES"]

others = RuleBook(*(name for name in FRAMEWORKS if name != "terrazzo"))
sharded = RuleBook("deepspeed", "fsdp1", "fsdp2")
fsdp, fsdp2 = RuleBook("fsdp1", "fsdp2"), RuleBook("fsdp2")
megatron, torchao = RuleBook("megatron"), RuleBook("torchao")


def _partly_offloaded(setup: Setup) -> bool:
    whole = ((), ("weight", "grad", "optim"), ("weight", "between", "grad", "optim"))
    return in_shares(setup) or tuple(tiers(setup)) not in whole


@others.refuses(
    "whole model in one unit",
    reason=(
        "The whole model is one sharding unit: all weights of {model} are gathered at once, so the peak is the whole "
        "model again, and nothing can overlap."
    ),
    alternative="Make each transformer block a unit (units= or the wrap policy).",
    source="torch.distributed.fsdp.fully_shard, notes on calling it bottom-up; huggingface/accelerate#1943",
)
def _whole_model_in_one_unit(setup: Setup) -> bool:
    return whole_model(setup)


@others.warns(
    "zero-bubble schedule elsewhere",
    reason="zero_bubble is ZB-H1 as Terrazzo runs it: waits of a third of 1F1B's are counted.",
    alternative=(
        "Use pipeline 1f1b, which other frameworks run as well, or look up which zero-bubble schedule they have."
    ),
    source="arXiv 2401.10241, section 2.1",
)
def _zero_bubble_schedule_elsewhere(setup: Setup) -> bool:
    return setup.mesh.pp > 1 and setup.pipeline == "zero_bubble"


@others.refuses(
    "batch that does not divide",
    reason="A global batch of {global_batch} does not divide by {at_once}.",
    alternative=(
        "Use a global batch of {full_batches}, or another micro-batch or number of GPUs; `terrazzo train` leaves the "
        "last rows empty."
    ),
    source=(
        "deepspeedai/DeepSpeed deepspeed/runtime/config.py (_batch_assertion); NVIDIA/Megatron-LM "
        "megatron/core/num_microbatches_calculator.py; pytorch/torchtitan torchtitan/train.py"
    ),
)
def _batch_that_does_not_divide(setup: Setup) -> bool:
    return setup.empty_rows > 0


@others.warns(
    "fewer micro-batches than stages",
    reason="{micro_batches} micro-batches cannot keep {pp} pipeline stages busy: the bubble is {bubble} of the work.",
    alternative="Use 4 micro-batches per stage or more.",
    source="arXiv 2104.04473, section 2.2",
)
def _fewer_micro_batches_than_stages(setup: Setup) -> bool:
    return setup.mesh.pp > 1 and setup.micro_batches < setup.mesh.pp


@others.warns(
    "uneven pipeline stages",
    reason="{layers} layers do not divide evenly over {stages} stages: the others wait for the longest.",
    alternative="Use a pp, and virtual_stages, whose product divides {layers}.",
    source="arXiv 2104.04473, section 2.2",
)
def _uneven_pipeline_stages(setup: Setup) -> bool:
    return setup.mesh.pp > 1 and setup.model.layers % (setup.mesh.pp * setup.virtual_stages) > 0


@others.warns(
    "vocabulary does not divide",
    reason="The vocabulary of {vocab} does not divide by tp {tp}: it has to be padded to {padded_vocab}.",
    alternative="Pad the vocabulary, to a multiple of 128 × tp for speed.",
    source="NVIDIA/Megatron-LM --make-vocab-size-divisible-by",
)
def _vocabulary_does_not_divide(setup: Setup) -> bool:
    return setup.mesh.tp > 1 and setup.model.vocab % setup.mesh.tp > 0


@others.refuses(
    "accumulation with the optimizer in backward",
    reason="Each of {micro_batches} micro-batches would update the weights, so nothing is accumulated.",
    alternative="Use one larger micro-batch, or step after backward.",
    source="pytorch/torchtune docs (optimizer_in_bwd)",
)
def _accumulation_with_the_optimizer_in_backward(setup: Setup) -> bool:
    return setup.framework.optimizer_in_backward and setup.micro_batches > 1


@fsdp.refuses(
    "FSDP on NVMe",
    reason="FSDP has no disk tier.",
    alternative="Use zero3@cpu-all where the host's memory allows it, or DeepSpeed's ZeRO-Infinity.",
    source="torch.distributed.fsdp.CPUOffloadPolicy (2.13 to 2.15)",
)
def _fsdp_on_nvme(setup: Setup) -> bool:
    return on_disk(setup)


@fsdp.refuses(
    "part of the states offloaded",
    reason=(
        "FSDP's CPU offload is all or nothing: weights, gradients and optimizer go to the host together, not only "
        "{offloaded}."
    ),
    alternative="Use zero3@cpu-all, or DeepSpeed for the optimizer alone.",
    source="torch.distributed.fsdp.CPUOffloadPolicy; pytorch/pytorch#187615",
)
def _part_of_the_states_offloaded(setup: Setup) -> bool:
    return not on_disk(setup) and _partly_offloaded(setup)


@fsdp.warns(
    "clipping offloaded gradients",
    reason="clip_grad_norm_ on offloaded gradients needs a process group that reduces CPU tensors.",
    alternative="Initialise it with backend cpu:gloo,cuda:nccl.",
    source="pytorch/pytorch#148532",
)
def _clipping_offloaded_gradients(setup: Setup) -> bool:
    return "grad" in tiers(setup) and setup.framework.clip


@fsdp2.refuses(
    "ZeRO-1 or 2 under FSDP2",
    reason="FSDP2 always splits the weights: it has no {plan}.",
    alternative="Use shard_grad_op (reshard_after_forward=False), or DDP with ZeroRedundancyOptimizer.",
    source="pytorch/pytorch#155952; meta-pytorch/torchtune#2402",
)
def _no_zero_1_or_2(setup: Setup) -> bool:
    """Only the optimizer, or gradients and optimizer, are split while the weights are not."""
    return zero_stage(setup) in (1, 2)


@sharded.refuses(
    "optimizer sharded over replicas",
    reason=(
        "Neither FSDP's hybrid sharding nor DeepSpeed splits the optimizer over the replicas of a shard group too."
    ),
    alternative="Use hybrid_shard under FSDP, hpz under DeepSpeed, or Megatron-FSDP or Terrazzo for hfsdp.",
    source="pytorch/pytorch#148257",
)
def _optimizer_sharded_over_replicas(setup: Setup) -> bool:
    return setup.plan.row == "hfsdp"


@fsdp2.warns(
    "tied weights in two units",
    reason="{model} ties its head to its embedding; since torch 2.13 fully_shard raises where two units share one.",
    alternative="Leave both to the root module, or pass them as one list to fully_shard.",
    source="pytorch/pytorch#176076; huggingface/accelerate#4171",
)
def _tied_weights_in_two_units(setup: Setup) -> bool:
    return setup.model.tied and zero_stage(setup) == 3 and not setup.framework.before(2, 13)


@fsdp2.refuses(
    "tied weights trained apart",
    reason=(
        "{model} ties its head to its embedding; before torch 2.13 FSDP2 could leave a rank's part of it untrained."
    ),
    alternative="Use torch 2.13 or newer and keep both in the root module, or untie them.",
    source="pytorch/pytorch#176076",
)
def _tied_weights_trained_apart(setup: Setup) -> bool:
    return setup.model.tied and zero_stage(setup) == 3 and setup.framework.before(2, 13)


@fsdp.warns(
    "fp8 gathered in bf16",
    reason="Weights are gathered in bf16 unless torchao's float8 tensors do it.",
    alternative="Use enable_fsdp_float8_all_gather, and expect less where units are small.",
    source="pytorch/torchtitan docs/float8.md, #653",
)
def _fp8_gathered_in_bf16(setup: Setup) -> bool:
    return setup.matmul == "fp8"


@fsdp2.warns(
    "quantised moments of DTensors",
    reason=(
        "Quantised optimizers look at the size of the local shard, so their precision depends on the number of ranks."
    ),
    alternative="Use torchao's optimizers, and keep small tensors in fp32 by their global size.",
    source="pytorch/ao#4912; bitsandbytes-foundation/bitsandbytes#1633",
)
def _quantised_moments_of_dtensors(setup: Setup) -> bool:
    return setup.optimizer.name in ("adamw-8bit", "adamw-4bit")


@megatron.refuses(
    "Megatron beyond ZeRO-1",
    reason="Megatron's distributed optimizer splits the optimizer alone (zero1); {plan} is stage {zero_stage}.",
    alternative="Use zero1, or Megatron-FSDP.",
    source="NVIDIA/Megatron-LM docs (dist_optimizer, custom_fsdp)",
)
def _megatron_beyond_zero_1(setup: Setup) -> bool:
    return zero_stage(setup) >= 2


@megatron.refuses(
    "Megatron on NVMe",
    reason="Megatron offloads the optimizer to the host, not to disk.",
    alternative="Use zero1@cpu (HybridDeviceOptimizer).",
    source="NVIDIA/Megatron-LM megatron/core/optimizer/cpu_offloading",
)
def _megatron_on_nvme(setup: Setup) -> bool:
    return on_disk(setup)


@torchao.refuses(
    "torchao's offload on several ranks",
    reason="torchao's CPUOffloadOptimizer is for a single GPU.",
    alternative="Use FSDP2's CPU offload or DeepSpeed's.",
    source="pytorch/ao torchao/optim README",
)
def _torchao_offload_on_several_ranks(setup: Setup) -> bool:
    return bool(tiers(setup)) and setup.cluster.count > 1


@torchao.refuses(
    "torchao's offload with clipping",
    reason="torchao's CPUOffloadOptimizer steps while backward runs, before the norm of all gradients is known.",
    alternative="Switch clipping off, or keep the optimizer on the GPU.",
    source="pytorch/ao torchao/optim README",
)
def _torchao_offload_with_clipping(setup: Setup) -> bool:
    return bool(tiers(setup)) and setup.framework.clip


@torchao.refuses(
    "torchao's offloaded gradients with accumulation",
    reason=(
        "torchao's offload_gradients frees each gradient once it is on the host: {micro_batches} micro-batches are "
        "not added up."
    ),
    alternative="Leave gradients on the GPU, or use one micro-batch.",
    source="pytorch/ao torchao/optim README",
)
def _torchao_offloaded_gradients_with_accumulation(setup: Setup) -> bool:
    return "grad" in tiers(setup) and setup.micro_batches > 1


PEER_RULES = [*others.rules, *sharded.rules, *fsdp.rules, *fsdp2.rules, *megatron.rules, *torchao.rules]
