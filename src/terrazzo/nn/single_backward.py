"""Backwards whose own gradient is not known: what is rounded to 8 bits, and what was computed in forward already."""

from __future__ import annotations

import torch

from terrazzo.errors import Misuse

__all__ = ["check_no_graph"]


def check_no_graph(what: str, instead: str) -> None:
    """Raise `Misuse` inside of a backward that keeps a graph, for a second one.

    Torch's `once_differentiable` looks at what the backward is given, and where that is constant, as behind a sum,
    it keeps none without a word: a penalty would have no gradient. Compiled graphs are torch's to refuse.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise Misuse(
            f"{what} can be differentiated once, and a gradient of it was taken with create_graph=True, as penalties "
            f"on gradients take theirs: {instead}."
        )
