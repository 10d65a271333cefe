"""Has a model share its sequences: one with a method for it, or one of `transformers`."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from terrazzo.errors import BadInput
from terrazzo.marks import SHARES_SEQUENCES
from terrazzo.parallel.context.context import Context
from terrazzo.parallel.context.transformers_attention import is_of_transformers, register
from terrazzo.parallel.peft_adapters import base_of

__all__ = ["context_of", "share_sequences", "whole_sequences"]


def share_sequences(model: nn.Module, context: Context) -> None:
    """Have `model` compute attention over the parts of sequences that the ranks of `context` hold. Before `tz.shard`.

    A module with a method `use_context(context)`, as the built-in decoder, is given it; its attention calls
    `context.attend`. A model of `transformers` gets an attention function by its registry, in adapters too.

    Raises:
        BadInput: a model that has neither, one whose attention cannot be shared, or one that shares already.
    """
    known = context_of(model)
    if known is not None:
        raise BadInput(
            f"The model shares its sequences over {known.size} ranks already ({known.mode}). Call tz.parallelize with a"
            " context once."
        )
    base, _ = base_of(model)
    taker: Any = getattr(base, "use_context", None)
    if callable(taker):
        taker(context)
    elif is_of_transformers(base):
        register(base, context, called=model)
    else:
        raise BadInput(
            f"A {type(model).__name__} cannot share its sequences over {context.size} ranks: its attention would see"
            " this rank's part alone. Give it a method use_context(context), and let its attention call"
            " context.attend(query, key, value, context.mask(positions, tokens)); or use cp 1."
        )
    model.register_forward_pre_hook(lambda *_: context.begin_forward(), prepend=True)
    model.register_forward_hook(lambda *_: context.end_forward(), always_call=True)
    SHARES_SEQUENCES.leave(model, context)


def context_of(model: nn.Module) -> Context | None:
    """What `share_sequences` gave a model; None where it has whole sequences."""
    context: Context | None = SHARES_SEQUENCES.find(model)
    return context


def whole_sequences(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, every rank gives the model whole sequences, as one does that writes text."""
    context = context_of(model)
    return contextlib.nullcontext() if context is None else context.unsplit()
