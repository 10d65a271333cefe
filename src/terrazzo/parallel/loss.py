"""Cross-entropy of logits of which each rank has a part of the vocabulary."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.errors import BadInput
from terrazzo.parallel.ranks import TensorRanks, runs_of, tensor_ranks

__all__ = ["VocabularyLoss", "leave_vocabulary", "vocabulary_of"]

_VOCABULARY = "terrazzo_vocabulary"
"""Attribute of a model whose logits stay apart."""


class VocabularyLoss:
    """What `torch.nn.functional.cross_entropy` gives of the whole logits, which no rank has.

    For a head of style `column`. Ranks along `tp` exchange three numbers for each position. Collective.

    Args:
        mesh: that the model was cut for; or its ranks along `tp`.
        vocabulary: tokens in it.
        ignore_index: the target of positions that do not count.
    """

    def __init__(self, mesh: DeviceMesh | TensorRanks, vocabulary: int, ignore_index: int = -100) -> None:
        self._ranks = mesh if isinstance(mesh, TensorRanks) else tensor_ranks(mesh)
        self._vocabulary, self._ignored = vocabulary, ignore_index
        self._start, self._stop = runs_of(vocabulary, self._ranks.size)[self._ranks.rank]

    def __call__(self, logits: Tensor, targets: Tensor, reduction: Literal["sum", "none"] = "sum") -> Tensor:
        """The sum of the losses of all positions that count, 0-d fp32, the same on every rank.

        Args:
            logits: this rank's part, `[..., part of the vocabulary]`.
            targets: int64, of the shape before it.
            reduction: with `none` the loss of each position, of the shape of `targets`; 0 where it does not count.

        Raises:
            BadInput: logits of another width than this rank's part.
        """
        if logits.shape[-1] != self._stop - self._start:
            raise BadInput(
                f"VocabularyLoss was given logits of width {logits.shape[-1]}, and this rank's part of a vocabulary of "
                f"{self._vocabulary} is {self._stop - self._start}: give the head the style 'column', which leaves "
                "them apart."
            )
        wide = logits.float()
        shifted = wide - self._ranks.highest(wide.amax(dim=-1)).unsqueeze(-1)
        total = self._ranks.sum(shifted.exp().sum(dim=-1))
        outside = (targets < self._start) | (targets >= self._stop)
        own = (targets - self._start).masked_fill(outside, 0)
        chosen = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
        losses = total.log() - self._ranks.sum(chosen)
        counted = torch.where(targets == self._ignored, torch.zeros_like(losses), losses)
        return counted.sum() if reduction == "sum" else counted

    def whole(self, logits: Tensor) -> Tensor:
        """All ranks' parts of `logits` together, `[..., vocabulary]`, the same on every rank. Collective."""
        return self._ranks.join_channels(logits, self._vocabulary)


def leave_vocabulary(model: nn.Module, loss: VocabularyLoss) -> None:
    """Note on a model that the logits it returns are this rank's part, and what computes with them."""
    vars(model)[_VOCABULARY] = loss


def vocabulary_of(model: nn.Module) -> VocabularyLoss | None:
    """What `leave_vocabulary` noted; None where logits are whole."""
    found: VocabularyLoss | None = vars(model).get(_VOCABULARY)
    return found
