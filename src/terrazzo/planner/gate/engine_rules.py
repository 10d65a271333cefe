"""What Terrazzo's engine and `terrazzo train` do not run yet, or run badly."""

from __future__ import annotations

import torch

from terrazzo.parallel.transformers_support import CUT_MATRICES, NO_STAGES, SHARED_SEQUENCES
from terrazzo.planner.gate.rule import Rule
from terrazzo.planner.gate.rules import whole_model
from terrazzo.planner.layout.buckets import is_packed
from terrazzo.planner.layout.stages import trains_everywhere, units_on
from terrazzo.planner.model.families import FAMILIES
from terrazzo.planner.model.shapes import BUILT_IN, TensorShape, UnitShape, parts_along_tp
from terrazzo.planner.setup.setup import Setup

__all__ = ["ENGINE_RULES"]


def _no_tensor_plan(setup: Setup) -> bool:
    """Whether no plan of tensor parallelism is known. Of families whose tensors only `transformers` can tell, it tells
    the plan too, as a run begins.
    """
    model = setup.model
    known = not model.family or model.family in FAMILIES
    return setup.mesh.tp > 1 and not model.bare and known and model.family not in (BUILT_IN, *CUT_MATRICES)


def _counts_tokens_again(setup: Setup) -> bool:
    """Whether ranks along tp would all give experts the same tokens. Where nothing is exchanged each rank's own experts
    have the same gradient of them, and nothing counts twice.
    """
    shared = setup.model.experts > 0 and (setup.mesh.ep > 1 or setup.model.family == BUILT_IN)
    return shared and setup.mesh.tp > 1 and setup.whole_experts and not setup.sequence_parallel


def _no_context(setup: Setup) -> bool:
    """Whether it is not known that ranks can share sequences; modules of one's own may bring a method for it."""
    return setup.mesh.cp > 1 and setup.model.family not in ("", BUILT_IN, *SHARED_SEQUENCES)


def _trains_nothing_somewhere(setup: Setup) -> bool:
    """Whether a stage of a pipeline has frozen parameters alone."""
    is_frozen = setup.mesh.pp > 1 and setup.model.layers and setup.model.trainable_numel < setup.model.numel
    return bool(is_frozen) and not trains_everywhere(setup)


def _too_small_a_share(setup: Setup) -> bool:
    units = sum(count for _, count in units_on(setup, 0))
    return any(
        set(place.shares) != {place.tier_of(index, units) for index in range(units)}
        for place in setup.plan.places().values()
        if len(place.shares) > 1
    )


def _packs_nothing(setup: Setup) -> bool:
    return setup.precision.frozen is not None and not any(map(_packed_in, setup.model.units))


def _cuts_blocks(setup: Setup) -> bool:
    """Whether ranks along tp would cut a block of a matrix that is kept in 4 bits."""
    form, tp = setup.precision.frozen, setup.mesh.tp
    if form is None or tp == 1:
        return False
    for unit in setup.model.units:
        for tensor in _packed_in(unit):
            parts, (rows, columns) = parts_along_tp(tensor, unit.block, tp, setup.whole_experts), tensor.shape
            by_columns = tensor.split in ("row", "row_splits")
            each = [columns, columns // parts] if by_columns else [rows // parts * columns]
            if parts > 1 and any(numel % form.blocks.numel for numel in each):
                return True
    return False


def _packed_in(unit: UnitShape) -> list[TensorShape]:
    return [tensor for tensor in unit.tensors if is_packed(tensor, unit)]


ENGINE_RULES = (
    Rule(
        name="no matrix for 4 bits",
        scope=("terrazzo",),
        severity="refuse",
        applies=lambda setup: _packs_nothing(setup),
        reason="Frozen matrices of linear layers inside of blocks are kept in 4 bits, and this model has none.",
        alternative="Plan with --lora, whose base is frozen and stays in 16 bits.",
        source="terrazzo.engine.sharding.packed_checks.check_packed",
    ),
    Rule(
        name="blocks of 4 bits that ranks along tp cut",
        scope=("terrazzo",),
        severity="refuse",
        applies=lambda setup: _cuts_blocks(setup),
        reason="Ranks along tp would cut blocks of 64 elements, whose scale they share.",
        alternative="Use fewer ranks along tp.",
        source="terrazzo.engine.sharding.packed_checks.check_packed",
    ),
    Rule(
        name="4 bits that fp8 would round again",
        scope=("terrazzo",),
        severity="refuse",
        applies=lambda setup: setup.precision.frozen is not None and setup.matmul == "fp8",
        reason="Frozen matrices in 4 bits are decoded to 16 bits, which products in fp8 would round again.",
        alternative="Use precision bf16, or --lora, whose base stays in 16 bits.",
        source="terrazzo.config.sections.precision",
    ),
    Rule(
        name="experts beside 4 bits",
        scope=("terrazzo",),
        severity="warn",
        applies=lambda setup: setup.precision.frozen is not None and setup.model.experts > 0,
        reason=(
            "Experts' matrices are stacked, no linear layers: they stay in 16 bits, and have no adapters beside them."
        ),
        alternative="Nothing has to change: these figures count it.",
        source="terrazzo.engine.plan.packed_members.packed_members",
    ),
    Rule(
        name="share without a unit",
        scope=("terrazzo",),
        severity="warn",
        applies=lambda setup: _too_small_a_share(setup),
        reason=lambda it: (
            f"{it.plan} places {it.offloaded}: of {it.units} units one of these shares, or what is left on the "
            "device, has none."
        ),
        alternative=lambda it: f"Use a share of 1/{it.units} or more, or smaller units.",
        source="terrazzo.engine.plan.place.Place.tier_of",
    ),
    Rule(
        name="gradients away from their optimizer",
        scope=("terrazzo",),
        severity="warn",
        applies=lambda setup: setup.plan.grad.offloaded and not setup.plan.optim.offloaded,
        reason=lambda it: (
            f"{it.plan} places gradients on {it.grad_tier} and the optimizer on the device: they go there and come "
            "back in every step."
        ),
        alternative="Offload the optimizer with them, or leave both on the device.",
        source="terrazzo.engine.buckets.gradients.gradient",
    ),
    Rule(
        name="pipeline parallelism",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.mesh.pp > 1 and setup.cluster.device.kind != "cpu",
        reason=lambda it: f"Pipelines have run on CPUs alone yet (pp {it.pp}).",
        alternative="Plan with it, but run with pp 1.",
        source="terrazzo.parallel.pipeline",
    ),
    Rule(
        name="empty rows",
        scope=("terrazzo",),
        severity="warn",
        applies=lambda setup: setup.empty_rows > 0,
        reason=lambda it: (
            f"{it.empty_rows} of {it.rows} rows of a step are empty, {it.empty_share} of its computing: a global batch "
            f"of {it.global_batch} does not divide by {it.at_once}."
        ),
        alternative=lambda it: (
            f"What is learnt is the same; a global batch of {it.full_batches}, or another micro-batch or number of "
            "ranks, has no empty rows."
        ),
        source="terrazzo.train.settings.plan.micro_batches_per_rank",
    ),
    Rule(
        name="stages without a micro-batch",
        scope=("terrazzo",),
        severity="refuse",
        applies=lambda setup: setup.mesh.pp > 1 and setup.micro_batches < setup.mesh.pp,
        reason=lambda it: (
            f"{it.micro_batches} micro-batches do not fill {it.pp} stages, of which some would always wait."
        ),
        alternative=lambda it: (
            f"Use {it.pp} micro-batches or more: a larger global batch, a smaller micro-batch, or a smaller pp."
        ),
        source="terrazzo.parallel.pipeline.schedules.actions_of",
    ),
    Rule(
        name="stage that trains nothing",
        scope=("terrazzo",),
        severity="refuse",
        applies=lambda setup: _trains_nothing_somewhere(setup),
        reason=lambda it: (
            f"One of the stages (pp {it.pp}) has no parameter to train, from which on gradients come back."
        ),
        alternative="Use fewer stages, or freeze less.",
        source="terrazzo.parallel.pipeline.cut_into_stages",
    ),
    Rule(
        name="stages of a model without a line",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.mesh.pp > 1 and setup.model.family in NO_STAGES,
        reason=lambda it: (
            f"Of {it.model} transformers does not say through which modules its values go (base_model_pp_plan): "
            f"terrazzo train cuts it into no stages (pp {it.pp})."
        ),
        alternative=(
            "Plan with it, but run with pp 1, or give tz.parallelize a tz.Pipeline(line=[...]) in a loop of your own."
        ),
        source="terrazzo.parallel.pipeline.model_line.own_line",
    ),
    Rule(
        name="experts of tokens that ranks along tp share",
        scope=("terrazzo",),
        severity="refuse",
        applies=lambda setup: _counts_tokens_again(setup),
        reason=lambda it: (
            f"Without sequence parallelism the ranks along tp {it.tp} would all give experts the same tokens, and each "
            "would count as often."
        ),
        alternative="Use sequence parallelism, or tp 1.",
        source="terrazzo.parallel.parallelize_model",
    ),
    Rule(
        name="no plan of tensor parallelism",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: _no_tensor_plan(setup),
        reason=lambda it: (
            f"No plan of tensor parallelism is known of {it.model}, neither its own nor one of transformers that "
            f"Terrazzo carries out (tp {it.tp})."
        ),
        alternative=(
            "Run with tp 1, or give tz.parallelize or parallel.tensor.plan styles of its linear layers; these figures"
            " assume the usual ones."
        ),
        source="terrazzo.parallel.tensor.model_plans",
    ),
    Rule(
        name="attention that ranks cannot share",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: _no_context(setup),
        reason=lambda it: f"Terrazzo does not know of {it.model} that its tokens meet in attention alone (cp {it.cp}).",
        alternative="Plan with it, but run with cp 1.",
        source="terrazzo.parallel.transformers_support.SHARED_SEQUENCES",
    ),
    Rule(
        name="scales of 32 elements",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.recipe == "mx",
        reason="`terrazzo train` multiplies in fp8 with a scale for each matrix or each row, not for 32 elements.",
        alternative="Plan with precision fp8 or fp8-rowwise, or convert the model's layers with torchao.",
        source="terrazzo.nn.float8_matrices",
    ),
    Rule(
        name="tensor-parallel exchanges beside products",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.mesh.tp > 1 and setup.tensor_overlap != "none",
        reason=lambda it: f"Terrazzo waits for each exchange along tp (tp {it.tp}), and hides none behind products.",
        alternative="Plan with tensor overlap none.",
        source="terrazzo.parallel.tensor.activation_exchanges",
    ),
    Rule(
        name="experts beside fp8",
        scope=("terrazzo",),
        severity="warn",
        applies=lambda setup: setup.matmul == "fp8" and setup.model.experts > 0,
        reason=(
            "Experts' matrices are stacked, and stay in bf16 where linear layers multiply in fp8: a step takes longer"
            " than these figures say."
        ),
        alternative="Plan with precision bf16 as well: time lies between both.",
        source="terrazzo.nn.float8_conversion",
    ),
    Rule(
        name="optimizer that sees whole matrices",
        scope=("terrazzo",),
        severity="refuse",
        applies=lambda setup: not setup.optimizer.runs,
        reason=lambda it: (
            f"{it.optimizer} does not update each element from its own values alone, and the engine does not bring its "
            "matrices together."
        ),
        alternative=(
            "Use adamw, adam, lion, ademamix, rmsprop, adagrad, momentum or sgd; or muon, whose matrices it does."
        ),
        source="terrazzo.engine.optim.stock.elementwise.check_elementwise",
    ),
    Rule(
        name="optimizer that torch does not have",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.optimizer.torch_class is None,
        reason=lambda it: (
            f"`terrazzo train` takes optimizers of torch.optim and tz.optim, which have no {it.optimizer}."
        ),
        alternative="Use adamw, or pass an elementwise optimizer of your own to tz.shard.",
        source="terrazzo.train.settings.optimizer.optimizer_class",
    ),
    Rule(
        name="loss without all logits, in fp16",
        scope=("terrazzo",),
        severity="refuse",
        applies=lambda setup: setup.loss == "chunked" and setup.precision.compute == torch.float16,
        reason="Under fp16 a chunk's gradients would be formed before their loss scale is known.",
        alternative="Plan with loss full, or with precision bf16.",
        source="terrazzo.nn.linear_cross_entropy",
    ),
    Rule(
        name="fused loss",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.loss == "fused",
        reason="`terrazzo train` takes torch's cross_entropy, which is not fused.",
        alternative="Plan with loss full, or use a fused loss in a loop of your own.",
        source="terrazzo.train.model.head_loss",
    ),
    Rule(
        name="compiled stages",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.compile and setup.mesh.pp > 1,
        reason="No stage of a pipeline is compiled yet.",
        alternative="Leave --compile out, or plan without pp.",
        source="terrazzo.config.section_rules.stages",
    ),
    Rule(
        name="compiled attention that exchanges",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.compile and setup.mesh.cp > 1,
        reason="Compiled blocks have not been tried with attention that exchanges with other ranks.",
        alternative="Leave --compile out, or plan without cp.",
        source="terrazzo.config.section_rules.shared_sequences",
    ),
    Rule(
        name="attention that keeps its scores",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.attention == "math" and not setup.model.soft_caps,
        reason=(
            "`terrazzo train` takes torch's scaled_dot_product_attention, which keeps no scores where a fused kernel "
            "serves."
        ),
        alternative="Plan with attention flash, or shard a model of your own with tz.shard.",
        source="terrazzo.train.model; torch.nn.functional.scaled_dot_product_attention",
    ),
    Rule(
        name="kernel that no configuration names",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.attention not in ("flash", "math") and not setup.model.soft_caps,
        reason=lambda it: f"`terrazzo train` takes torch's scaled_dot_product_attention, which is no {it.attention}.",
        alternative="Plan with attention flash, or call that kernel in a model of your own and give it to tz.shard.",
        source="terrazzo.train.model; torch.nn.functional.scaled_dot_product_attention",
    ),
    Rule(
        name="kernel with a soft cap",
        scope=("terrazzo",),
        severity="planned",
        applies=lambda setup: setup.attention != "math" and setup.model.soft_caps,
        reason=lambda it: f"{it.model} caps its scores, which `terrazzo train` computes eagerly and keeps.",
        alternative="Leave the attention open, or take a kernel with a soft cap in a loop of your own.",
        source="transformers: attn_implementation eager where a model does not support sdpa (Gemma-2)",
    ),
    Rule(
        name="model in one unit",
        scope=("terrazzo",),
        severity="warn",
        applies=whole_model,
        reason=lambda it: (
            f"{it.model} is one sharding unit: all its weights are gathered at once, so the peak is the whole model "
            "again, and nothing can overlap."
        ),
        alternative="Leave it so where it fits, else make each repeated block a unit (plan.units).",
        source="terrazzo.engine.plan.unit_choice",
    ),
)
