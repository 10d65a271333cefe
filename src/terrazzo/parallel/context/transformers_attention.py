"""Models of `transformers` under context parallelism: an attention function in its registry, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from terrazzo.errors import BadInput, Misuse
from terrazzo.marks import SHARES_SEQUENCES
from terrazzo.parallel.context.context import Context
from terrazzo.parallel.context.mode_rules import check_window
from terrazzo.parallel.transformers_support import SHARED_SEQUENCES

__all__ = ["attention_heads", "check_config", "is_of_transformers", "register"]

NAME = "terrazzo_context"
"""The name of the attention function, as a value of a config's `attn_implementation`."""

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout")


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model's class is of `transformers`; it is not imported for this."""
    module = sys.modules.get("transformers")
    return module is not None and isinstance(model, module.PreTrainedModel)


def check_config(values: Mapping[str, Any], mode: str, ranks: int) -> None:
    """Refuse models whose attention cannot be shared by ranks.

    Args:
        values: the contents of a config.json.
        mode: of the context.
        ranks: how many share a sequence.

    Raises:
        BadInput: there.
    """
    kind = values.get("model_type")
    if kind not in SHARED_SEQUENCES:
        raise BadInput(
            f"Context parallelism (cp {ranks}) needs a model whose tokens meet in attention alone, and of model_type"
            f" {kind!r} this is not known; it is of {', '.join(sorted(SHARED_SEQUENCES))}. Use one of these, or cp 1."
        )
    window = values.get("sliding_window")
    layers = values.get("layer_types")
    slides = window is not None and values.get("use_sliding_window", True) is not False
    if slides and (layers is None or "sliding_attention" in layers):
        check_window(mode, window, f"this model of model_type {kind!r}")
    if values.get("reorder_and_upcast_attn"):
        raise BadInput(
            "The model's config has reorder_and_upcast_attn, for which transformers has attention of its own. Set it"
            " to false to share sequences over ranks (cp)."
        )
    if values.get("output_router_logits"):
        raise BadInput(
            f"The model's config has output_router_logits, and ranks that share a sequence (cp {ranks}) would each"
            " compute the routers' loss of a part of it. Set it to false, or cp 1."
        )
    for name in _DROPOUTS:
        if values.get(name):
            raise BadInput(
                f"The model's config has {name} {values[name]}, and attention that ranks share (cp {ranks}) drops"
                f" nothing. Set {name} to 0."
            )


def attention_heads(values: Mapping[str, Any]) -> int | None:
    """How many heads of queries the contents of a config.json give; None where they do not say."""
    heads = values.get("num_attention_heads", values.get("n_head"))
    return heads if isinstance(heads, int) else None


def register(model: nn.Module, context: Context, called: nn.Module) -> None:
    """Have a model of `transformers` share its sequences as `context` says.

    Args:
        called: the model, or what is around it, whose arguments are looked at.

    Raises:
        BadInput: a model whose attention cannot be shared, before it is changed.
    """
    import transformers
    from transformers.masking_utils import AttentionMaskInterface

    owner: Any = model
    check_config(values := owner.config.to_dict(), context.mode, context.size)
    if (heads := attention_heads(values)) is not None:
        context.check_heads(heads)
    transformers.AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    owner.set_attn_implementation(NAME)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            SHARES_SEQUENCES.leave(module, context)
    called.register_forward_pre_hook(_Checks(context), with_kwargs=True)


class _Checks:
    """Refuses what a model would do to a part of a sequence as if it were all of it."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.context.is_split:
            return
        if kwargs.get("labels") is not None:
            raise Misuse(
                "The model was given labels, which it would shift inside of this rank's part of the sequence. Shift"
                " targets first, then split them with context.split(...), and compute the loss from the logits."
            )
        self.context.check_positions(kwargs.get("position_ids"))


def _attention(  # structure: signature fixed by transformers
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `transformers` calls it: queries `[B, heads, tokens, head_dim]`, outputs `[B, tokens, heads, head_dim]`."""
    context: Context | None = SHARES_SEQUENCES.find(module)
    positions = kwargs.get("position_ids")
    if context is None or positions is None:
        raise Misuse(
            f"A {type(module).__name__} computes attention that ranks share, without"
            f" {'tz.parallelize(model, mesh, context=...)' if context is None else 'position_ids'}."
        )
    is_causal = kwargs.get("is_causal")
    unusual = {
        "a custom mask": attention_mask is not None,
        "dropout in attention": dropout > 0.0,
        "attention sinks": kwargs.get("s_aux") is not None,
        "a soft cap on scores": kwargs.get("softcap") is not None,
        "a bias of positions": kwargs.get("position_bias") is not None,
        "attention that is not causal": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
    }
    if unsupported := [name for name, is_asked in unusual.items() if is_asked]:
        raise Misuse(
            f"A {type(module).__name__} asks for {' and '.join(unsupported)}, which attention that ranks share"
            f" ({context.mode}) does not compute. Use cp 1 for this model."
        )
    mask = context.mask(positions, query.shape[2], kwargs.get("sliding_window"))
    layer = getattr(module, "layer_idx", None) or 0
    return context.attend(query, key, value, mask, scaling, layer=layer).transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """What is seen follows from positions, in `Context.mask`. `transformers` gives what its caller gave it.

    Raises:
        Misuse: a mask.
    """
    if attention_mask is not None:
        raise Misuse(
            "The model shares sequences with other ranks, and was given an attention_mask: a custom mask is not"
            " computed. Leave it out: documents are kept apart by position_ids, and what fills a sequence up at its end"
            " is not seen by what is before."
        )
