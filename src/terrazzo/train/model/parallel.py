"""Divides the model of a run among ranks that share its layers, matrices or sequences, before it has an optimizer."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import terrazzo as tz
from terrazzo.config import Config
from terrazzo.marks import SHARES_MATRICES
from terrazzo.parallel import Colwise, Logits, TensorPlan, VocabularyLoss, leave_vocabulary, own_plan, styles_of
from terrazzo.train.model.decoder import Decoder

__all__ = ["leaves_logits_apart", "name_of_head", "parallelize_model", "pipeline_of", "plan_of", "vocabulary_apart"]


def parallelize_model(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Divide `model` along the axes of `plan.mesh`, as the section `parallel` says. Collective.

    No rank has all logits, unless `parallel.tensor.plan` gathers them.

    Raises:
        BadInput: on every rank, if the model cannot be divided.
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
        leave_vocabulary(model, VocabularyLoss(SHARES_MATRICES.of(model), vocabulary))


def pipeline_of(config: Config) -> tz.Pipeline | None:
    """How ranks share layers; None if each has all."""
    settings = config.parallel.pipeline
    return tz.Pipeline(settings.schedule, settings.chunks) if config.plan.mesh.pp > 1 else None


def plan_of(model: nn.Module, config: Config) -> TensorPlan:
    """How matrices are cut: by `parallel.tensor.plan`, or by the model's own plan without gathering logits.

    Raises:
        BadInput: the model has no plan of its own.
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
    """The number of logits of a token if each rank keeps only a part of them; 0 if each has all.

    Args:
        model: not cut yet.
    """
    head = name_of_head(model)
    style = styles_of(model, plan).get(head) if plan else None
    if isinstance(style, Logits):
        return 0 if style.gathered else style.numel
    stays = isinstance(style, Colwise) and not style.gathered
    return int(getattr(model.get_submodule(head), "out_features", 0)) if stays else 0


def leaves_logits_apart(config: Config) -> bool:
    """Whether each rank keeps only a part of the logits, judged by the configuration, before there is a model.

    A head is not part of another module, so the plan's name for it has no dot.
    """
    plan = config.parallel.tensor.plan
    named = plan == "auto" or any(style == "colwise" for glob, style in plan.items() if "." not in glob)
    return config.plan.mesh.tp > 1 and named


def name_of_head(model: nn.Module) -> str:
    """The name of the module that gives the logits; empty if that is not known."""
    if isinstance(model, Decoder):
        return "tied_head" if model.head is None else "head"
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    return next((name for name, module in model.named_modules() if module is head), "") if head is not None else ""
