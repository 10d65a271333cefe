"""What Terrazzo's engine does not run yet, or runs badly."""

from __future__ import annotations

import torch

from terrazzo.parallel.transformers_support import CUT_MATRICES, NO_STAGES, SHARED_SEQUENCES
from terrazzo.planner.gate.facts import most_of_model
from terrazzo.planner.gate.rule import RuleBook
from terrazzo.planner.layout.buckets import is_packed
from terrazzo.planner.layout.stages import trains_everywhere, units_on
from terrazzo.planner.model.families import FAMILIES
from terrazzo.planner.model.shapes import BUILT_IN, TensorShape, UnitShape, parts_along_tp
from terrazzo.planner.setup.setup import Setup

__all__ = ["ENGINE_RULES"]

terrazzo = RuleBook("terrazzo")


def _packed_in(unit: UnitShape) -> list[TensorShape]:
    return [tensor for tensor in unit.tensors if is_packed(tensor, unit)]


@terrazzo.refuses(
    "no matrix for 4 bits",
    reason="Frozen matrices of linear layers inside of blocks are kept in 4 bits, and this model has none.",
    alternative="Plan with --lora, whose base is frozen and stays in 16 bits.",
    source="terrazzo.engine.sharding.packed_checks.check_packed",
)
def _packs_nothing(setup: Setup) -> bool:
    return setup.precision.frozen is not None and not any(map(_packed_in, setup.model.units))


@terrazzo.refuses(
    "blocks of 4 bits that ranks along tp cut",
    reason="Ranks along tp would cut blocks of 64 elements, whose scale they share.",
    alternative="Use fewer ranks along tp.",
    source="terrazzo.engine.sharding.packed_checks.check_packed",
)
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


@terrazzo.warns(
    "experts beside 4 bits",
    reason="Experts' matrices are stacked, no linear layers: they stay in 16 bits, and have no adapters beside them.",
    alternative="Nothing has to change: these figures count it.",
    source="terrazzo.engine.partition.packed_members.packed_members",
)
def _experts_beside_4_bits(setup: Setup) -> bool:
    return setup.precision.frozen is not None and setup.model.experts > 0


@terrazzo.warns(
    "share without a unit",
    reason=(
        "{plan} places {offloaded}: of {units} units one of these shares, or what is left on the device, has none."
    ),
    alternative="Use a share of 1/{units} or more, or smaller units.",
    source="terrazzo.engine.plan.place.Place.tier_of",
)
def _too_small_a_share(setup: Setup) -> bool:
    units = sum(count for _, count in units_on(setup, 0))
    return any(
        set(place.shares) != {place.tier_of(index, units) for index in range(units)}
        for place in setup.plan.places().values()
        if len(place.shares) > 1
    )


@terrazzo.warns(
    "gradients away from their optimizer",
    reason=(
        "{plan} places gradients on {grad_tier} and the optimizer on the device: they go there and come back in "
        "every step."
    ),
    alternative="Offload the optimizer with them, or leave both on the device.",
    source="terrazzo.engine.buckets.gradients.gradient",
)
def _gradients_away_from_their_optimizer(setup: Setup) -> bool:
    return setup.plan.grad.offloaded and not setup.plan.optim.offloaded


@terrazzo.plans(
    "pipeline parallelism",
    reason="Pipelines have run on CPUs alone yet (pp {pp}).",
    alternative="Plan with it, but run with pp 1.",
    source="terrazzo.parallel.pipeline",
)
def _pipeline_parallelism(setup: Setup) -> bool:
    return setup.mesh.pp > 1 and setup.cluster.device.kind != "cpu"


@terrazzo.refuses(
    "stages without a micro-batch",
    reason="{micro_batches} micro-batches do not fill {pp} stages, of which some would always wait.",
    alternative="Use {pp} micro-batches or more: a larger global batch, a smaller micro-batch, or a smaller pp.",
    source="terrazzo.parallel.pipeline.schedules.actions_of",
)
def _stages_without_a_micro_batch(setup: Setup) -> bool:
    return setup.mesh.pp > 1 and setup.micro_batches < setup.mesh.pp


@terrazzo.refuses(
    "stage that trains nothing",
    reason="One of the stages (pp {pp}) has no parameter to train, from which on gradients come back.",
    alternative="Use fewer stages, or freeze less.",
    source="terrazzo.parallel.pipeline.cut_into_stages",
)
def _trains_nothing_somewhere(setup: Setup) -> bool:
    """Whether a stage of a pipeline has frozen parameters alone."""
    is_frozen = setup.mesh.pp > 1 and setup.model.layers and setup.model.trainable_numel < setup.model.numel
    return bool(is_frozen) and not trains_everywhere(setup)


@terrazzo.plans(
    "stages of a model without a line",
    reason=(
        "Of {model} transformers does not say through which modules its values go (base_model_pp_plan): terrazzo "
        "train cuts it into no stages (pp {pp})."
    ),
    alternative=(
        "Plan with it, but run with pp 1, or give tz.parallelize a tz.Pipeline(line=[...]) in a loop of your own."
    ),
    source="terrazzo.parallel.pipeline.model_line.own_line",
)
def _stages_of_a_model_without_a_line(setup: Setup) -> bool:
    return setup.mesh.pp > 1 and setup.model.family in NO_STAGES


@terrazzo.refuses(
    "experts of tokens that ranks along tp share",
    reason=(
        "Without sequence parallelism the ranks along tp {tp} would all give experts the same tokens, and each would "
        "count as often."
    ),
    alternative="Use sequence parallelism, or tp 1.",
    source="terrazzo.parallel.parallelize_model",
)
def _counts_tokens_again(setup: Setup) -> bool:
    """Whether ranks along tp would all give experts the same tokens. Where nothing is exchanged each rank's own experts
    have the same gradient of them, and nothing counts twice.
    """
    shared = setup.model.experts > 0 and (setup.mesh.ep > 1 or setup.model.family == BUILT_IN)
    return shared and setup.mesh.tp > 1 and setup.whole_experts and not setup.sequence_parallel


@terrazzo.plans(
    "no plan of tensor parallelism",
    reason=(
        "No plan of tensor parallelism is known of {model}, neither its own nor one of transformers that Terrazzo "
        "carries out (tp {tp})."
    ),
    alternative=(
        "Run with tp 1, or give tz.parallelize or parallel.tensor.plan styles of its linear layers; these figures "
        "assume the usual ones."
    ),
    source="terrazzo.parallel.tensor.model_plans",
)
def _no_tensor_plan(setup: Setup) -> bool:
    """Whether no plan of tensor parallelism is known. Of families whose tensors only `transformers` can tell, it tells
    the plan too, as a run begins.
    """
    model = setup.model
    known = not model.family or model.family in FAMILIES
    return setup.mesh.tp > 1 and not model.bare and known and model.family not in (BUILT_IN, *CUT_MATRICES)


@terrazzo.plans(
    "attention that ranks cannot share",
    reason="Terrazzo does not know of {model} that its tokens meet in attention alone (cp {cp}).",
    alternative="Plan with it, but run with cp 1.",
    source="terrazzo.parallel.transformers_support.SHARED_SEQUENCES",
)
def _no_context(setup: Setup) -> bool:
    """Whether it is not known that ranks can share sequences; modules of one's own may bring a method for it."""
    return setup.mesh.cp > 1 and setup.model.family not in ("", BUILT_IN, *SHARED_SEQUENCES)


@terrazzo.plans(
    "tensor-parallel exchanges beside products",
    reason="Terrazzo waits for each exchange along tp (tp {tp}), and hides none behind products.",
    alternative="Plan with tensor overlap none.",
    source="terrazzo.parallel.tensor.activation_exchanges",
)
def _tensor_parallel_exchanges_beside_products(setup: Setup) -> bool:
    return setup.mesh.tp > 1 and setup.tensor_overlap != "none"


@terrazzo.warns(
    "experts beside fp8",
    reason=(
        "Experts' matrices are stacked, and stay in bf16 where linear layers multiply in fp8: a step takes longer "
        "than these figures say."
    ),
    alternative="Plan with precision bf16 as well: time lies between both.",
    source="terrazzo.nn.float8_conversion",
)
def _experts_beside_fp8(setup: Setup) -> bool:
    return setup.matmul == "fp8" and setup.model.experts > 0


@terrazzo.refuses(
    "optimizer that sees whole matrices",
    reason=(
        "{optimizer} does not update each element from its own values alone, and the engine does not bring its "
        "matrices together."
    ),
    alternative="Use adamw, adam, lion, ademamix, rmsprop, adagrad, momentum or sgd; or muon, whose matrices it does.",
    source="terrazzo.engine.optim.stock.elementwise.check_elementwise",
)
def _optimizer_that_sees_whole_matrices(setup: Setup) -> bool:
    return not setup.optimizer.runs


@terrazzo.refuses(
    "loss without all logits, in fp16",
    reason="Under fp16 a chunk's gradients would be formed before their loss scale is known.",
    alternative="Plan with loss full, or with precision bf16.",
    source="terrazzo.nn.linear_cross_entropy",
)
def _loss_without_all_logits_in_fp16(setup: Setup) -> bool:
    return setup.loss == "chunked" and setup.precision.compute == torch.float16


@terrazzo.warns(
    "model in one unit",
    reason=(
        "{model} is one sharding unit, or most of it is: its weights are gathered at once, so the peak is nearly the "
        "whole model again, and little can overlap."
    ),
    alternative="Leave it so where it fits, else make each repeated block a unit (plan.units).",
    source="terrazzo.engine.partition.unit_sizes",
)
def _model_in_one_unit(setup: Setup) -> bool:
    return most_of_model(setup)


ENGINE_RULES = terrazzo.rules
