"""Whether ranks can share what is trained, by numbers: those of the configuration, or of a folder's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.parallel import Chunks
from terrazzo.parallel.sharing_rules import (
    computes_windows,
    shares_experts,
    shares_heads,
    shares_key_heads,
    splits_tokens,
    tokens_step,
)

__all__ = ["check_heads", "check_own_heads", "check_sizes", "check_ulysses", "check_widths"]


def check_sizes(config: Config) -> None:
    """Raise `BadInput` if ranks cannot share sequences, or the built-in decoder, by the configuration's own numbers."""
    mesh = config.plan.mesh
    if config.model.kind == "decoder":
        _check_experts(config)
    if mesh.ranks_per_batch > 1:
        _check_lengths(config)
    if config.model.kind == "decoder" and mesh.cp > 1:
        _check_context(config)
    if config.model.kind == "decoder" and mesh.tp > 1:
        _check_tensor(config)
    if config.model.kind == "huggingface" and mesh.tp > 1 and config.objective.kind.scored:
        raise BadInput(
            f"plan.mesh.tp is {mesh.tp}, and objective 'reward' puts a score over the body of a model of transformers,"
            " which has no plan of tensor parallelism. Set plan.mesh.tp=1, or model.kind=decoder."
        )


def _check_experts(config: Config) -> None:
    shared, count = config.plan.mesh.ep, config.model.experts.count
    if count is not None and not shares_experts(count, shared):
        raise BadInput(
            f"plan.mesh.ep is {shared}, and model.experts.count {count} does not divide by it: each rank has as many."
            f" Use a plan.mesh.ep that divides {count}."
        )
    if shared > 1 and count is None:
        raise BadInput(
            f"plan.mesh.ep is {shared}, and the model has no experts that ranks can share. Set model.experts.count, or"
            " plan.mesh.ep=1."
        )


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
    check_ulysses(config, config.model.heads, "model.heads")
    window = config.model.attention.window
    if window is not None and not computes_windows(config.parallel.context.mode):
        raise BadInput(
            f"parallel.context.mode 'ring' sends keys around that no token within model.attention.window {window}"
            " sees. Use parallel.context.mode=gather or ulysses."
        )


def check_ulysses(config: Config, heads: int | None, key: str) -> None:
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


def _check_tensor(config: Config) -> None:
    tp, model = config.plan.mesh.tp, config.model
    kv_heads = model.kv_heads or model.heads
    check_heads(tp, {"model.heads": model.heads, "model.kv_heads": kv_heads})
    ffn_dim = model.ffn_dim if model.experts.count is None else None  # those of experts are not cut
    check_widths(tp, {"model.ffn_dim": ffn_dim, "model.vocab_size": model.vocab_size})
    check_own_heads(config, kv_heads)


def check_own_heads(config: Config, kv_heads: Any) -> None:
    """Check heads against `parallel.tensor.plan`, whose styles say nothing about them."""
    tp = config.plan.mesh.tp
    if config.parallel.tensor.plan != "auto" and isinstance(kv_heads, int) and not shares_heads(kv_heads, tp):
        raise BadInput(
            f"parallel.tensor.plan cuts columns into equal parts, and the {kv_heads} key heads do not divide by"
            f" plan.mesh.tp {tp}. Use a plan.mesh.tp that divides {kv_heads}, or parallel.tensor.plan=auto, where a"
            " rank computes the key head that it needs."
        )


def check_heads(tp: int, counts: Mapping[str, Any]) -> None:
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


def check_widths(tp: int, widths: Mapping[str, Any]) -> None:
    """Check widths: ranks' parts may differ by one, but none may be empty."""
    for key, width in widths.items():
        if isinstance(width, int) and width < tp:
            raise BadInput(
                f"plan.mesh.tp is {tp}, and {key} {width} has no part for each rank. Use a plan.mesh.tp of at most"
                f" {width}."
            )
