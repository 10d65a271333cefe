"""What DeepSpeed refuses, ignores, or runs otherwise than asked, in the versions that sources name."""

from __future__ import annotations

import torch

from terrazzo.planner.gate.facts import in_shares, on_disk, tiers, zero_stage
from terrazzo.planner.gate.rule import RuleBook
from terrazzo.planner.setup.setup import Setup

__all__ = ["DEEPSPEED_RULES"]

deepspeed = RuleBook("deepspeed")

_OPTIMIZER = {"grad", "optim"}
"""What DeepSpeed offloads with the optimizer."""


def _accumulates_narrowly(setup: Setup) -> bool:
    return setup.precision.compute != torch.float32 and setup.precision.accumulate == torch.float32


@deepspeed.refuses(
    "AutoTP with ZeRO-3",
    reason="Before DeepSpeed 0.19.4, AutoTP trains with ZeRO stages 0 to 2 only.",
    alternative="Use stage 2, or DeepSpeed 0.19.4 or newer.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py: an assertion in 0.19.3, gone in 0.19.4; #8168",
)
def _autotp_with_zero_3(setup: Setup) -> bool:
    return setup.mesh.tp > 1 and zero_stage(setup) == 3 and setup.framework.before(0, 19, 4)


@deepspeed.warns(
    "young AutoTP with ZeRO-3",
    reason="AutoTP with ZeRO-3 came with DeepSpeed 0.19.4; its tutorial still names stages 0 to 2.",
    alternative="Compare losses with stage 2 before a long run.",
    source="deepspeedai/DeepSpeed #8167, #8168; docs/_tutorials/autotp-training.md",
)
def _young_autotp_with_zero_3(setup: Setup) -> bool:
    return setup.mesh.tp > 1 and zero_stage(setup) == 3 and not setup.framework.before(0, 19, 4)


@deepspeed.refuses(
    "AutoTP in a pipeline",
    reason="DeepSpeed's AutoTP does not combine with its pipeline engine.",
    alternative="Use AutoTP with ZeRO, or Megatron's tensor parallelism under the pipeline.",
    source="deepspeedai/DeepSpeed#7147",
)
def _autotp_in_a_pipeline(setup: Setup) -> bool:
    return setup.mesh.tp > 1 and setup.mesh.pp > 1


@deepspeed.refuses(
    "PipelineModule with ZeRO-2 or 3",
    reason="DeepSpeed's PipelineEngine asserts a ZeRO stage below 2; {plan} is stage {zero_stage}.",
    alternative="Use zero1 with the pipeline, or stage 3 without it.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/pipe/engine.py (0.19.7), #1110",
)
def _pipelinemodule_with_zero_2_or_3(setup: Setup) -> bool:
    return setup.mesh.pp > 1 and zero_stage(setup) >= 2


@deepspeed.refuses(
    "weights offloaded below ZeRO-3",
    reason=(
        "Below stage 3 DeepSpeed accepts offload_param and ignores it without a word: the weights stay on the GPU."
    ),
    alternative="Use zero3, or offload the optimizer alone.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
)
def _weights_offloaded_below_zero_3(setup: Setup) -> bool:
    return "weight" in tiers(setup) and zero_stage(setup) < 3


@deepspeed.refuses(
    "NVMe below ZeRO-3",
    reason="Below stage 3 DeepSpeed treats nvme as cpu without a word: the host must hold it all.",
    alternative="Use zero3@nvme, or ask for cpu and count the host's memory.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py (0.19.8)",
)
def _nvme_below_zero_3(setup: Setup) -> bool:
    return on_disk(setup, "optim") and zero_stage(setup) < 3


@deepspeed.refuses(
    "offload in shares",
    reason=(
        "DeepSpeed offloads a share of the optimizer alone (`ratio`, Twin-Flow), from ZeRO-3 to the CPU, not "
        "{offloaded}."
    ),
    alternative="Use zero3 and offload a share of the optimizer, or all of a state.",
    source=("deepspeedai/DeepSpeed blogs/deepspeed-offloadpp; docs/_pages/config-json.md (offload_optimizer.ratio)"),
)
def _offload_in_shares(setup: Setup) -> bool:
    return in_shares(setup) and (zero_stage(setup) < 3 or on_disk(setup) or set(tiers(setup)) != _OPTIMIZER)


@deepspeed.refuses(
    "offload at stage 0",
    reason="DeepSpeed offloads the optimizer at stages 1 to 3 only.",
    alternative="Use zero1@cpu or higher.",
    source="deepspeedai/DeepSpeed docs/_pages/config-json.md (offload_optimizer)",
)
def _offload_at_stage_0(setup: Setup) -> bool:
    return bool(tiers(setup)) and zero_stage(setup) == 0


@deepspeed.refuses(
    "offload with another optimizer",
    reason="With offload DeepSpeed wants its own CPU Adam, Lion or Adagrad, not {optimizer}.",
    alternative="Use adamw, or set zero_force_ds_cpu_optimizer to false and expect a slow step.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (zero_force_ds_cpu_optimizer)",
)
def _offload_with_another_optimizer(setup: Setup) -> bool:
    return "optim" in tiers(setup) and setup.optimizer.name not in ("adamw", "adam", "lion", "adagrad")


@deepspeed.refuses(
    "expert layers with ZeRO-3",
    reason="deepspeed.moe asserts a stage of 2 or lower.",
    alternative="Use zero2 with it, or AutoEP with ZeRO-3.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
)
def _expert_layers_with_zero_3(setup: Setup) -> bool:
    return setup.framework.expert_layers and zero_stage(setup) == 3


@deepspeed.refuses(
    "expert parallelism with hpZ",
    reason="AutoEP with ZeRO-3 excludes ZeRO++'s hpZ and qgZ.",
    alternative="Use zero3.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
)
def _expert_parallelism_with_hpz(setup: Setup) -> bool:
    return setup.mesh.ep > 1 and setup.plan.row == "hpz"


@deepspeed.refuses(
    "AutoEP with AutoTP and ZeRO-3",
    reason="AutoEP with ZeRO-3 does not combine with AutoTP yet.",
    alternative="Use zero2, or tp 1.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.7)",
)
def _autoep_with_autotp_and_zero_3(setup: Setup) -> bool:
    return setup.mesh.ep > 1 and setup.mesh.tp > 1 and zero_stage(setup) == 3


@deepspeed.refuses(
    "shard groups without MiCS",
    reason="DeepSpeed 0.19.7 removed MiCS: it cannot shard states within a group and replicate them over groups.",
    alternative="Use zero3 or hpz, or FSDP2 or Terrazzo for {plan}.",
    source="deepspeedai/DeepSpeed#8490; deepspeed/runtime/zero/mics.py, in 0.19.6 for the last time",
)
def _shard_groups_without_mics(setup: Setup) -> bool:
    return setup.plan.row in ("hybrid_shard", "hybrid_shard_zero2") and not setup.framework.before(0, 19, 7)


@deepspeed.refuses(
    "ring attention",
    reason="DeepSpeed has no context parallelism by ring attention.",
    alternative="Use Ulysses (sequence_parallel_size), for which heads must divide.",
    source="deepspeedai/DeepSpeed deepspeed/sequence (0.19.8)",
)
def _ring_attention(setup: Setup) -> bool:
    return setup.mesh.cp > 1 and setup.context != "ulysses"


@deepspeed.warns(
    "every micro-batch all-reduced",
    reason=(
        "DeepSpeed's ZeRO-2 all-reduces whole buckets for each of {micro_batches} micro-batches, whatever "
        "reduce_scatter says, and its no_sync raises."
    ),
    alternative="Use zero1 where the gradients fit, which communicates once.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py (0.19.8), #5758, #7059",
)
def _every_micro_batch_all_reduced(setup: Setup) -> bool:
    return setup.plan.row == "zero2" and setup.micro_batches > 1


@deepspeed.warns(
    "accumulation in 16 bits",
    reason=(
        "DeepSpeed's ZeRO-2 and 3 add up {micro_batches} micro-batches in 16 bits by default, not in fp32 as this "
        "plan counts."
    ),
    alternative="Set data_types.grad_accum_dtype to fp32, or use larger micro-batches.",
    source="deepspeedai/DeepSpeed#2352, #5898",
)
def _accumulation_in_16_bits(setup: Setup) -> bool:
    return setup.micro_batches > 1 and zero_stage(setup) >= 2 and _accumulates_narrowly(setup)


@deepspeed.refuses(
    "fp32 accumulation at stage 0",
    reason="At stage 0 DeepSpeed raises unless gradients are accumulated in the weights' dtype.",
    alternative="Use zero1, which may accumulate in fp32.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.8)",
)
def _fp32_accumulation_at_stage_0(setup: Setup) -> bool:
    return zero_stage(setup) == 0 and _accumulates_narrowly(setup)


@deepspeed.refuses(
    "Muon in BF16_Optimizer",
    reason="At stage 1 with fp32 accumulation DeepSpeed hands Muon flat shards, and it would train as plain SGD.",
    alternative="Use zero2 or zero3.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/engine.py (0.19.7)",
)
def _muon_in_bf16_optimizer(setup: Setup) -> bool:
    return setup.optimizer.name == "muon" and zero_stage(setup) == 1 and _accumulates_narrowly(setup)


@deepspeed.refuses(
    "whole matrices in DeepSpeed's flat shards",
    reason="ZeRO gives adafactor flat shards instead of matrices, so its rows and columns mean nothing.",
    alternative="Use adamw or lion.",
    source="deepspeedai/DeepSpeed deepspeed/runtime/zero (flattened partitions)",
)
def _whole_matrices_in_deepspeed_flat_shards(setup: Setup) -> bool:
    return setup.optimizer.name == "adafactor" and zero_stage(setup) >= 1


@deepspeed.refuses(
    "DeepSpeed's fp8",
    reason="DeepSpeed has no fp8 training of its own.",
    alternative="Build the model with TransformerEngine or torchao layers, or use bf16.",
    source="deepspeedai/DeepSpeed docs/_pages/config-json.md (0.19.8)",
)
def _deepspeed_fp8(setup: Setup) -> bool:
    return setup.matmul == "fp8"


@deepspeed.warns(
    "compiled ZeRO-3",
    reason="torch.compile breaks its graphs at ZeRO-3's hooks on every module.",
    alternative="Use DeepCompile (CUDA), or stage 2.",
    source="pytorch/pytorch#115484; deepspeedai/DeepSpeed#6719",
)
def _compiled_zero_3(setup: Setup) -> bool:
    return setup.compile and zero_stage(setup) == 3


DEEPSPEED_RULES = deepspeed.rules
