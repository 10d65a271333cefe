"""What `terrazzo train` has no configuration for, and what its models do not do."""

from __future__ import annotations

from terrazzo.parallel.transformers_support import CHANGED_LOGITS
from terrazzo.planner.gate.rule import RuleBook
from terrazzo.planner.model.shapes import BUILT_IN
from terrazzo.planner.setup.kernels import why_unfused
from terrazzo.planner.setup.setup import Setup

__all__ = ["TRAIN_RULES"]

terrazzo = RuleBook("terrazzo")


@terrazzo.refuses(
    "4 bits that fp8 would round again",
    reason="Frozen matrices in 4 bits are decoded to 16 bits, which products in fp8 would round again.",
    alternative="Use precision bf16, or --lora, whose base stays in 16 bits.",
    source="terrazzo.config.sections.precision",
)
def _4_bits_that_fp8_would_round_again(setup: Setup) -> bool:
    return setup.precision.frozen is not None and setup.matmul == "fp8"


@terrazzo.warns(
    "empty rows",
    reason=(
        "{empty_rows} of {rows} rows of a step are empty, {empty_share} of its computing: a global batch of "
        "{global_batch} does not divide by {at_once}."
    ),
    alternative=(
        "What is learnt is the same; a global batch of {full_batches}, or another micro-batch or number of ranks, "
        "has no empty rows."
    ),
    source="terrazzo.train.settings.plan.micro_batches_per_rank",
)
def _empty_rows(setup: Setup) -> bool:
    return setup.empty_rows > 0


@terrazzo.plans(
    "optimizer that torch does not have",
    reason="`terrazzo train` takes optimizers of torch.optim and tz.optim, which have no {optimizer}.",
    alternative="Use adamw, or pass an elementwise optimizer of your own to tz.shard.",
    source="terrazzo.train.settings.optimizer.optimizer_class",
)
def _optimizer_that_torch_does_not_have(setup: Setup) -> bool:
    return setup.optimizer.torch_class is None


@terrazzo.plans(
    "adapters on the built-in decoder",
    reason="`terrazzo train` trains adapters on a model of Hugging Face with weights, and {model} is none.",
    alternative="Plan for the folder of one, or put adapters on the decoder in a loop of your own.",
    source="terrazzo.config.section_rules.adapters",
)
def _adapters_on_the_built_in_decoder(setup: Setup) -> bool:
    return setup.adapters is not None and setup.model.family == BUILT_IN


@terrazzo.plans(
    "tensors frozen by name",
    reason="`terrazzo train` freezes what lora.rank says, and no parameters by name.",
    alternative=(
        "Leave --freeze out, or freeze them in a loop of your own and give the model to tz.shard: figures are of that."
    ),
    source="terrazzo.config.sections.lora",
)
def _tensors_frozen_by_name(setup: Setup) -> bool:
    return bool(setup.freeze)


@terrazzo.plans(
    "average of the weights",
    reason="`terrazzo train` keeps no average of the weights.",
    alternative="Leave --ema out, or keep a tz.EMA in a loop of your own: figures are of that.",
    source="terrazzo.engine.model.ema",
)
def _average_of_the_weights(setup: Setup) -> bool:
    return setup.ema


@terrazzo.plans(
    "micro-batches that only add up",
    reason="`terrazzo train` reduces every micro-batch under {plan}.",
    alternative="Leave accumulate_locally out, or add them up in a loop of your own, with no_sync.",
    source="terrazzo.train.steps.step",
)
def _micro_batches_that_only_add_up(setup: Setup) -> bool:
    return setup.accumulate_locally and bool(setup.plan.grad.axes)


@terrazzo.plans(
    "scales of 32 elements",
    reason="`terrazzo train` multiplies in fp8 with a scale for each matrix or each row, not for 32 elements.",
    alternative="Plan with precision fp8 or fp8-rowwise, or convert the model's layers with torchao.",
    source="terrazzo.nn.float8_matrices",
)
def _scales_of_32_elements(setup: Setup) -> bool:
    return setup.recipe == "mx"


@terrazzo.plans(
    "loss without all logits, of logits that are changed",
    reason="{model} scales, caps or shifts what its head makes, and a loss without all logits takes it as it is.",
    alternative="Plan with loss full, or compute that loss in a loop of your own.",
    source="terrazzo.train.model.head_loss.take_targets",
)
def _loss_without_all_logits_of_changed_ones(setup: Setup) -> bool:
    return setup.loss == "chunked" and setup.model.family in CHANGED_LOGITS


@terrazzo.plans(
    "fused loss",
    reason="`terrazzo train` takes torch's cross_entropy, which is not fused.",
    alternative="Plan with loss full, or use a fused loss in a loop of your own.",
    source="terrazzo.train.model.head_loss",
)
def _fused_loss(setup: Setup) -> bool:
    return setup.loss == "fused"


@terrazzo.plans(
    "compiled stages",
    reason="No stage of a pipeline is compiled yet.",
    alternative="Leave --compile out, or plan without pp.",
    source="terrazzo.config.section_rules.stages",
)
def _compiled_stages(setup: Setup) -> bool:
    return setup.compile and setup.mesh.pp > 1


@terrazzo.plans(
    "compiled attention that exchanges",
    reason="Compiled blocks have not been tried with attention that exchanges with other ranks.",
    alternative="Leave --compile out, or plan without cp.",
    source="terrazzo.config.section_rules.shared_sequences",
)
def _compiled_attention_that_exchanges(setup: Setup) -> bool:
    return setup.compile and setup.mesh.cp > 1


@terrazzo.plans(
    "fused kernel for attention that keeps its scores",
    reason="{unfused}, so that `terrazzo train` keeps all scores.",
    alternative="Leave the attention open, or take a fused kernel in a loop of your own.",
    source="terrazzo.planner.setup.kernels.unfused_by_itself",
)
def _fused_kernel_for_attention_that_keeps_its_scores(setup: Setup) -> bool:
    return not setup.keeps_scores and _unfused(setup)


def _unfused(setup: Setup) -> bool:
    return why_unfused(setup.model, setup.cluster.device) is not None


@terrazzo.plans(
    "attention that keeps its scores",
    reason=(
        "`terrazzo train` takes torch's scaled_dot_product_attention, which keeps no scores where a fused kernel "
        "serves."
    ),
    alternative="Plan with attention flash, or shard a model of your own with tz.shard.",
    source="terrazzo.train.model; torch.nn.functional.scaled_dot_product_attention",
)
def _attention_that_keeps_its_scores(setup: Setup) -> bool:
    return setup.keeps_scores and not _unfused(setup)


@terrazzo.plans(
    "kernel that no configuration names",
    reason="`terrazzo train` takes torch's scaled_dot_product_attention, which is no {attention}.",
    alternative="Plan with attention flash, or call that kernel in a model of your own and give it to tz.shard.",
    source="terrazzo.train.model; torch.nn.functional.scaled_dot_product_attention",
)
def _kernel_that_no_configuration_names(setup: Setup) -> bool:
    return setup.attention not in ("flash", "math") and not _unfused(setup)


TRAIN_RULES = terrazzo.rules
