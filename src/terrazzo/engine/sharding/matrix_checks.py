"""Checks that an optimizer can update matrices whole, before anything is done."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket_layout import BucketLayout
from terrazzo.engine.optim.stock.template import Templates
from terrazzo.errors import BadInput
from terrazzo.messages import listed
from terrazzo.optim import MatrixOptimizer

__all__ = ["check_matrices"]


def check_matrices(buckets: Sequence[BucketLayout], templates: Templates, optimizers: Sequence[Optimizer]) -> None:
    """Refuse stacks of matrices of which ranks have parts, and several optimizers of whole matrices.

    Args:
        buckets: all trainable ones.
        templates: of the param groups of all optimizers.
        optimizers: all that step the model.

    Raises:
        BadInput: there.
    """
    held = [
        (bucket, member)
        for bucket in buckets
        for member in bucket.members
        if member.group >= 0 and templates[member.group].matrices is not None
    ]
    of_matrices = sum(isinstance(each, MatrixOptimizer) for each in optimizers)
    if of_matrices > 1:
        raise BadInput(
            f"{of_matrices} optimizers of whole matrices for one model: matrices of all are shared out among the ranks "
            "at once. Use one tz.optim.Muon with several param groups."
        )
    stacks = [member.name for _, member in held if member.boxes and len(member.shape) > 2]
    if stacks:
        raise BadInput(
            f"{listed([*map(repr, stacks)])}: stacks of matrices of which ranks along tp have parts, which "
            "tz.optim.Muon does not put together. Leave tp out of the mesh, give these to AdamW "
            "(tz.optim.hidden_matrices(model, adamw=[...])), or leave them out of the tensor plan."
        )
