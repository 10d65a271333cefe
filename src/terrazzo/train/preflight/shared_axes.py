"""Whether ranks can share what is trained: sequences along cp, matrices along tp, experts along ep, layers along pp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.checkpoint.hub_folder import read_model_config
from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.parallel import (
    attention_heads,
    check_config,
    check_experts,
    check_line,
    check_styles,
)
from terrazzo.parallel.simulated_ranks import cut_simulated
from terrazzo.train.model.huggingface import tensor_styles
from terrazzo.train.model.parallel import plan_of
from terrazzo.train.model.prepare import ModelOnPaper
from terrazzo.train.preflight.axis_sizes import check_heads, check_own_heads, check_sizes, check_ulysses, check_widths

__all__ = ["check_axes"]


def check_axes(config: Config, whole: ModelOnPaper) -> None:
    """Raise `BadInput` if ranks cannot share the sequences, matrices, experts or layers of a configuration."""
    check_sizes(config)
    mesh = config.plan.mesh
    if config.model.kind == "huggingface":
        _check_huggingface(config, whole)
    if mesh.pp > 1:
        _check_pipeline(config, whole)
    if mesh.tp > 1:
        _check_cuts(config, whole)


def _check_huggingface(config: Config, whole: ModelOnPaper) -> None:
    """What a folder's model rules out."""
    mesh = config.plan.mesh
    if mesh.ep > 1:
        try:
            check_experts(whole.model, mesh.ep)
        except BadInput as error:
            raise BadInput(f"plan.mesh.ep {mesh.ep}: {error}") from None
    if mesh.ranks_per_batch == 1:
        return
    assert config.model.path is not None
    values = read_model_config(config.model.path)
    if mesh.cp > 1:
        check_config(values, config.parallel.context.mode, mesh.cp)
        check_ulysses(config, attention_heads(values), "num_attention_heads")
    if mesh.tp > 1:
        _check_transformers(config, values)


def _check_pipeline(config: Config, whole: ModelOnPaper) -> None:
    shared = config.plan.mesh.pp
    try:
        check_line(whole.model, shared * config.parallel.pipeline.chunks)
    except BadInput as error:
        raise BadInput(f"plan.mesh.pp {shared}: {error}") from None


def _check_transformers(config: Config, values: Mapping[str, Any]) -> None:
    """Check the matrices of a model of transformers."""
    tp, kind = config.plan.mesh.tp, values.get("model_type")
    by_theirs = config.parallel.tensor.plan == "auto"
    styles = tensor_styles(str(kind)) if by_theirs else {}
    if by_theirs and not styles:
        raise BadInput(
            f"plan.mesh.tp is {tp}, and transformers has no plan of tensor parallelism (base_model_tp_plan) for models"
            f" of model_type {kind!r}. Set plan.mesh.tp=1, use a model such as 'llama', or name the styles of"
            " its modules in parallel.tensor.plan."
        )
    check_styles(f"models of model_type {kind!r}", styles)
    heads = values.get("num_attention_heads")
    kv_heads = values.get("num_key_value_heads") or heads
    check_heads(tp, {"num_attention_heads": heads, "num_key_value_heads": kv_heads})
    check_widths(tp, {name: values.get(name) for name in ("hidden_size", "intermediate_size", "vocab_size")})
    check_own_heads(config, values.get("num_key_value_heads"))


def _check_cuts(config: Config, whole: ModelOnPaper) -> None:
    """Try on the model without memory how matrices would be cut: by which plan a model of transformers can be, only its
    modules say, and of matrices that are multiplied in 8 bits the parts have to have sizes that the hardware takes.

    The built-in decoder has a plan that is known to do.
    """
    settings, tp, linears = config.parallel.tensor, config.plan.mesh.tp, config.precision.recipe
    if settings.plan == "auto" and linears is None and config.model.kind == "decoder":
        return
    try:
        model = whole.copy()
        cut_simulated(model, tp, settings.sequence, plan_of(model, config))
    except BadInput as error:
        beside = f", with precision.linears '{config.precision.linears}'" if linears is not None else ""
        what = f"plan.mesh.tp is {tp}" if settings.plan == "auto" else "parallel.tensor.plan"
        raise BadInput(f"{what}{beside}: {error}") from None
