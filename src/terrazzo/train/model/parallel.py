"""The model of a run given to ranks that share its layers, matrices or sequences, before it has an optimizer."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import terrazzo as tz
from terrazzo.config import Config
from terrazzo.parallel import Colwise, Logits, TensorPlan, VocabularyLoss, leave_vocabulary, own_plan, style_of
from terrazzo.train.model.decoder import Decoder

__all__ = ["leaves_logits_apart", "name_of_head", "parallelize_model", "pipeline_of", "plan_of", "vocabulary_apart"]


def parallelize_model(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Have `model` share what `plan.mesh` says, as `parallel` says. Collective.

    No rank holds all logits, unless `parallel.tensor.plan` has them put together.

    Raises:
        BadInput: on every rank, a model that cannot be cut so.
    """
    settings, tp = config.parallel, config.plan.mesh.tp
    plan = plan_of(model, config) if tp > 1 else {}
    vocabulary = vocabulary_apart(model, plan)
    tz.parallelize(
        model,
        mesh,
        tensor=plan if tp > 1 else "auto",
        sequence=settings.tensor.sequence,
        context=settings.context.mode,
        balance=settings.context.balance,
        pipeline=pipeline_of(config),
    )
    if vocabulary:
        leave_vocabulary(model, VocabularyLoss(mesh, vocabulary))


def pipeline_of(config: Config) -> tz.Pipeline | None:
    """How ranks share layers; None where each has all."""
    settings = config.parallel.pipeline
    return tz.Pipeline(settings.schedule, settings.chunks) if config.plan.mesh.pp > 1 else None


def plan_of(model: nn.Module, config: Config) -> TensorPlan:
    """How its matrices are cut: as `parallel.tensor.plan` says, or as its own plan does, with logits that stay apart.

    Raises:
        BadInput: a model without a plan of its own.
    """
    configured = config.parallel.tensor.plan
    if configured != "auto":
        return configured
    if isinstance(model, Decoder):
        return model.tensor_plan(gathered=False)
    plan = own_plan(model, config.plan.mesh.tp)
    head = name_of_head(model)
    style = plan.get(head)
    return {**plan, head: replace(style, gathered=False)} if isinstance(style, Colwise) else plan


def vocabulary_apart(model: nn.Module, plan: TensorPlan) -> int:
    """Logits of a position that ranks have parts of once they are computed; 0 where each has all of them.

    Args:
        model: not cut yet.
    """
    head = name_of_head(model)
    style = style_of(model, plan, head)
    if isinstance(style, Logits):
        return 0 if style.gathered else style.numel
    stays = isinstance(style, Colwise) and not style.gathered
    return int(getattr(model.get_submodule(head), "out_features", 0)) if stays else 0


def leaves_logits_apart(config: Config) -> bool:
    """`vocabulary_apart` of a run before there is a model: as its configuration names the head, which is no part of any
    other module.
    """
    plan = config.parallel.tensor.plan
    named = plan == "auto" or any(style == "colwise" for glob, style in plan.items() if "." not in glob)
    return config.plan.mesh.tp > 1 and named


def name_of_head(model: nn.Module) -> str:
    """The module that gives the logits; empty where nothing says so."""
    if isinstance(model, Decoder):
        return "tied_head" if model.head is None else "head"
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    return next((name for name, module in model.named_modules() if module is head), "") if head is not None else ""
