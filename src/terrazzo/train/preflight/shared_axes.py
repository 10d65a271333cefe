"""Whether ranks can share what is trained: sequences along cp, matrices along tp, experts along ep, layers along pp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.checkpoint.hub_folder import read_model_config
from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.parallel import (
    Chunks,
    attention_heads,
    check_config,
    check_experts,
    check_line,
    check_styles,
)
from terrazzo.parallel.sharing_rules import (
    computes_windows,
    shares_experts,
    shares_heads,
    shares_key_heads,
    splits_tokens,
    tokens_step,
)
from terrazzo.parallel.simulated_ranks import cut_simulated
from terrazzo.train.model.huggingface import tensor_styles
from terrazzo.train.model.parallel import plan_of
from terrazzo.train.model.prepare import ModelOnPaper

__all__ = ["check_axes"]


def check_axes(config: Config, whole: ModelOnPaper) -> None:
    """Raise `BadInput` if ranks cannot share the sequences, matrices, experts or layers of a configuration."""
    mesh = config.plan.mesh
    _check_experts(config, whole)
    if mesh.pp > 1:
        _check_pipeline(config, whole)
    if mesh.ranks_per_batch == 1:
        return
    _check_lengths(config)
    if mesh.cp > 1:
        _check_context(config)
    if mesh.tp > 1:
        _check_tensor(config, whole)
        _check_linears(config, whole)


def _check_pipeline(config: Config, whole: ModelOnPaper) -> None:
    shared = config.plan.mesh.pp
    try:
        check_line(whole.model, shared * config.parallel.pipeline.chunks)
    except BadInput as error:
        raise BadInput(f"plan.mesh.pp {shared}: {error}") from None


def _check_experts(config: Config, whole: ModelOnPaper) -> None:
    shared, count = config.plan.mesh.ep, config.model.experts.count
    if count is not None and not shares_experts(count, shared):
        raise BadInput(
            f"plan.mesh.ep is {shared}, and model.experts.count {count} does not divide by it: each rank has as many."
            f" Use a plan.mesh.ep that divides {count}."
        )
    if shared > 1 and config.model.kind == "decoder" and count is None:
        raise BadInput(
            f"plan.mesh.ep is {shared}, and the model has no experts that ranks can share. Set model.experts.count, or"
            " plan.mesh.ep=1."
        )
    if shared > 1 and config.model.kind == "huggingface":
        try:
            check_experts(whole.model, shared)
        except BadInput as error:
            raise BadInput(f"plan.mesh.ep {shared}: {error}") from None


def _check_lengths(config: Config) -> None:
    mesh, length = config.plan.mesh, config.batch.sequence_length
    chunks = Chunks(mesh.cp, config.parallel.context.balance)
    try:
        chunks.check(length)
    except BadInput as error:
        raise BadInput(f"batch.sequence_length: {error}") from None
    if config.parallel.tensor.sequence and not splits_tokens(length, mesh.cp, mesh.tp):
        step = tokens_step(chunks, mesh.tp)
        fits = [str(fit) for fit in (length // step * step, (length // step + 1) * step) if fit]
        whole = "" if config.model.experts.count is not None else ", or parallel.tensor.sequence=false"
        raise BadInput(
            f"batch.sequence_length {length} gives each rank along plan.mesh.cp {mesh.cp} {length // mesh.cp} tokens,"
            f" which do not divide by plan.mesh.tp {mesh.tp}: between matrices each rank has a part of them. Use"
            f" sequences of {' or '.join(fits)} tokens{whole}."
        )


def _check_context(config: Config) -> None:
    shared, mode = config.plan.mesh.cp, config.parallel.context.mode
    if config.model.kind == "decoder":
        _check_ulysses(config, config.model.heads, "model.heads")
        window = config.model.attention.window
        if window is not None and not computes_windows(mode):
            raise BadInput(
                f"parallel.context.mode 'ring' sends keys around that no token within model.attention.window {window}"
                " sees. Use parallel.context.mode=gather or ulysses."
            )
        return
    assert config.model.path is not None
    values = read_model_config(config.model.path)
    check_config(values, mode, shared)
    _check_ulysses(config, attention_heads(values), "num_attention_heads")


def _check_ulysses(config: Config, heads: int | None, key: str) -> None:
    """Heads are divided along tp first, and then along cp while attention is computed."""
    mesh = config.plan.mesh
    if config.parallel.context.mode != "ulysses" or heads is None or shares_heads(heads, mesh.cp, mesh.tp):
        return
    ranks = f"plan.mesh.cp {mesh.cp}" + (f" × plan.mesh.tp {mesh.tp}" if mesh.tp > 1 else "")
    raise BadInput(
        f"parallel.context.mode 'ulysses' gives each of {ranks} ranks the same number of heads, and {key} {heads} do"
        f" not divide by {mesh.ranks_per_batch}. Use parallel.context.mode=gather, which needs no heads to divide, or"
        f" a mesh that divides {heads}."
    )


def _check_tensor(config: Config, whole: ModelOnPaper) -> None:
    tp = config.plan.mesh.tp
    if config.model.kind == "decoder":
        model = config.model
        _check_heads(tp, {"model.heads": model.heads, "model.kv_heads": model.kv_heads or model.heads})
        ffn_dim = model.ffn_dim if model.experts.count is None else None  # those of experts are not cut
        _check_widths(tp, {"model.ffn_dim": ffn_dim, "model.vocab_size": model.vocab_size})
        _check_own_plan(config, model.kv_heads or model.heads, whole)
        return
    assert config.model.path is not None
    if config.objective.kind.scored:
        raise BadInput(
            f"plan.mesh.tp is {tp}, and objective 'reward' puts a score over the body of a model of transformers, which"
            " has no plan of tensor parallelism. Set plan.mesh.tp=1, or model.kind=decoder."
        )
    values = read_model_config(config.model.path)
    _check_transformers(tp, values, config.parallel.tensor.plan == "auto")
    _check_own_plan(config, values.get("num_key_value_heads"), whole)


def _check_transformers(tp: int, values: Mapping[str, Any], by_theirs: bool) -> None:
    """Check a model of transformers; `by_theirs`: its matrices are cut by transformers' own plan."""
    kind = values.get("model_type")
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
    _check_heads(tp, {"num_attention_heads": heads, "num_key_value_heads": kv_heads})
    _check_widths(tp, {name: values.get(name) for name in ("hidden_size", "intermediate_size", "vocab_size")})


def _check_own_plan(config: Config, kv_heads: Any, whole: ModelOnPaper) -> None:
    """Try `parallel.tensor.plan` on the model without memory. Styles say nothing about heads, so these come first."""
    tp, settings = config.plan.mesh.tp, config.parallel.tensor
    if settings.plan == "auto":
        return
    if isinstance(kv_heads, int) and not shares_heads(kv_heads, tp):
        raise BadInput(
            f"parallel.tensor.plan cuts columns into equal parts, and the {kv_heads} key heads do not divide by"
            f" plan.mesh.tp {tp}. Use a plan.mesh.tp that divides {kv_heads}, or parallel.tensor.plan=auto, where a"
            " rank computes the key head that it needs."
        )
    try:
        cut_simulated(whole.copy(), tp, settings.sequence, settings.plan)
    except BadInput as error:
        raise BadInput(f"parallel.tensor.plan: {error}") from None


def _check_linears(config: Config, whole: ModelOnPaper) -> None:
    """Try whether the parts of matrices that are multiplied in 8 bits have sizes that the hardware takes."""
    if config.precision.recipe is None:
        return
    model = whole.copy()
    try:
        cut_simulated(model, config.plan.mesh.tp, config.parallel.tensor.sequence, plan_of(model, config))
    except BadInput as error:
        raise BadInput(f"precision.linears is '{config.precision.linears}'. {error}") from None


def _check_heads(tp: int, counts: Mapping[str, Any]) -> None:
    """Check the numbers of heads: each rank has the same number of query heads; fewer key heads are shared."""
    (key, heads), (kv_key, kv_heads) = counts.items()
    if isinstance(heads, int) and not shares_heads(heads, tp):
        raise BadInput(
            f"plan.mesh.tp is {tp}, and {key} {heads} do not divide by it: a rank needs whole heads, as many as the"
            f" others. Use a plan.mesh.tp that divides {heads}."
        )
    if isinstance(kv_heads, int) and not shares_key_heads(kv_heads, tp):
        raise BadInput(
            f"plan.mesh.tp is {tp}, and {kv_key} {kv_heads} neither divide by it nor divide it: a rank needs whole"
            f" heads. Use a plan.mesh.tp that divides {kv_heads}, or a multiple of it."
        )


def _check_widths(tp: int, widths: Mapping[str, Any]) -> None:
    """Check widths: ranks' parts may differ by one, but none may be empty."""
    for key, width in widths.items():
        if isinstance(width, int) and width < tp:
            raise BadInput(
                f"plan.mesh.tp is {tp}, and {key} {width} has no part for each rank. Use a plan.mesh.tp of at most"
                f" {width}."
            )
