"""Cross-entropy of logits of which each rank has a part of the vocabulary."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.errors import BadInput
from terrazzo.marks import Mark
from terrazzo.nn.chunked_cross_entropy import linear_cross_entropy
from terrazzo.nn.single_backward import check_no_graph
from terrazzo.nn.vocabulary_parts import places_in_part, softmax_terms
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks, runs_of, tensor_ranks

__all__ = ["VocabularyLoss", "leave_vocabulary", "vocabulary_of"]

_VOCABULARY = Mark["VocabularyLoss"]("terrazzo_vocabulary")
"""On a model whose logits stay apart."""


class VocabularyLoss:
    """The cross-entropy of the whole logits, of which each rank has a part, as `torch.nn.functional` has it.

    For a head of style `colwise`. Ranks along `tp` exchange three numbers for each position. Collective.

    Args:
        mesh: that the model was cut for; or the model's ranks along `tp`, with whose traffic that of the loss counts.
        vocabulary: how many tokens it has.
        ignore_index: the target of positions that do not count.

    Attributes:
        start: the first token of this rank's part.
        vocabulary: how many tokens all parts have together.
    """

    def __init__(self, mesh: DeviceMesh | TensorRanks, vocabulary: int, ignore_index: int = -100) -> None:
        ranks = mesh if isinstance(mesh, TensorRanks) else tensor_ranks(mesh)
        self._ranks = ranks.labelled(Label(Purpose.LOSS))
        self.vocabulary, self._ignored = vocabulary, ignore_index
        self.start, self._stop = runs_of(vocabulary, self._ranks.size)[self._ranks.rank]

    def __call__(self, logits: Tensor, targets: Tensor, reduction: Literal["sum", "none"] = "sum") -> Tensor:
        """The sum of the losses of all positions that count, 0-d, the same on every rank: fp32, or fp64 of such logits.

        Args:
            logits: this rank's part, `[..., part of the vocabulary]`.
            targets: int64, of the shape before it.
            reduction: with `none` the loss of each position, of the shape of `targets`; 0 where it does not count.

        Raises:
            BadInput: logits of another width than this rank's part; another reduction.
            Misuse: in backward, where a gradient is taken with `create_graph=True`.
            RuntimeError: from torch, for a target outside of the vocabulary that is not `ignore_index`.
        """
        if reduction not in ("sum", "none"):
            raise BadInput(
                f"VocabularyLoss was asked for the reduction {reduction!r}; it has 'sum' and 'none'. For a mean, "
                "divide the sum by the number of targets that count, on all data ranks together."
            )
        if logits.shape[-1] != self._stop - self.start:
            raise BadInput(
                f"VocabularyLoss was given logits of width {logits.shape[-1]}, and this rank's part of a vocabulary of "
                f"{self.vocabulary} is {self._stop - self.start}: give the head the style 'colwise', which leaves "
                "them apart."
            )
        places, elsewhere = self._places(targets)
        losses: Tensor = _CrossEntropy.apply(logits, places, elsewhere, self)  # type: ignore[no-untyped-call]
        counted = torch.where(targets == self._ignored, torch.zeros_like(losses), losses)
        return counted.sum() if reduction == "sum" else counted

    def of_hidden(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """`terrazzo.nn.linear_cross_entropy` of a head of which this rank has the part `weight`: without any logits.

        Args:
            hidden: what enters the head, `[..., dim]`, whole and the same on every rank.
            weight: `[part of the vocabulary, dim]`.
            targets: int64, of the shape before `dim`.
        """
        if weight.shape[0] != self._stop - self.start:
            raise BadInput(
                f"VocabularyLoss was given a weight of {weight.shape[0]} rows, and this rank's part of a vocabulary of "
                f"{self.vocabulary} has {self._stop - self.start}: cut the head with the style 'colwise'."
            )
        return linear_cross_entropy(hidden, weight, targets, ignore_index=self._ignored, parts=self)

    def maximum(self, values: Tensor) -> Tensor:
        """The elementwise maximum over the ranks along `tp`, without a gradient. Collective."""
        return self._ranks.maximum(values)

    def all_reduce(self, values: Tensor) -> Tensor:
        """The elementwise sum over the ranks along `tp`, in their order. Collective."""
        return self._ranks.all_reduce(values)

    def _places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets' places in this rank's part, and which of them are not there or do not count."""
        ignored = targets == self._ignored
        places, elsewhere = places_in_part(targets.masked_fill(ignored, 0), self.start, self._stop, self.vocabulary)
        return places, elsewhere | ignored

    def whole(self, logits: Tensor) -> Tensor:
        """All ranks' parts of `logits` together, `[..., vocabulary]`, the same on every rank. Collective."""
        return self._ranks.gather_channels(logits, self.vocabulary)


class _CrossEntropy(torch.autograd.Function):
    """The loss of each position. Beside the logits it keeps one copy of them, fp32 or wider: their probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, elsewhere: Tensor, parts: VocabularyLoss) -> Tensor:
        terms = softmax_terms(
            logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True), places, elsewhere, parts
        )
        ctx.save_for_backward(terms.exponentials.div_(terms.total.unsqueeze(-1)), places, elsewhere)
        ctx.dtype = logits.dtype
        return terms.total.log() - (terms.chosen - terms.highest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of a logit is its probability, less 1 if it is the target's, times that of the loss."""
        check_no_graph("VocabularyLoss", "make the mesh without tp for that")
        probabilities, places, elsewhere = ctx.saved_tensors
        each, places = grad.unsqueeze(-1), places.unsqueeze(-1)
        of_logits = torch.empty_like(probabilities, dtype=ctx.dtype)
        torch.mul(probabilities, each, out=of_logits)
        of_target = probabilities.gather(-1, places) - (~elsewhere).to(probabilities.dtype).unsqueeze(-1)
        of_logits.scatter_(-1, places, (of_target * each).to(ctx.dtype))
        return of_logits, None, None, None


def leave_vocabulary(model: nn.Module, loss: VocabularyLoss) -> None:
    """Leave a loss on a model whose logits are this rank's part, for `vocabulary_of` to find."""
    _VOCABULARY.leave(model, loss)


def vocabulary_of(model: nn.Module) -> VocabularyLoss | None:
    """The loss that `leave_vocabulary` has left on a model; None where logits are whole."""
    return _VOCABULARY.find(model)
