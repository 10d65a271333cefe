"""Optimizers beside those of torch, for any loop; `tz.shard` takes them under every plan.

Muon             whole matrices made orthogonal, and AdamW for all else, in one object
hidden_matrices  which parameters of a model are for it, a `Division`, which says why
Lion, AdEMAMix   elementwise: the sign of a momentum, and AdamW with a second, slow average

`moments_of` says what one keeps, to those who count memory. Its modules:

    elementwise       Lion and AdEMAMix
    muon              Muon
    matrix_optimizer  what an optimizer is whose update needs whole matrices
    matrix_selection  which parameters are matrices for it, and why the others are not
    moment_counts     how many states as large as a parameter each optimizer keeps
    optimizer_step    what `step` methods share
"""

from terrazzo.optim.elementwise import AdEMAMix, Lion
from terrazzo.optim.matrix_optimizer import MatrixOptimizer, is_matrix_group
from terrazzo.optim.matrix_selection import HEADS, Division, divided, hidden_matrices
from terrazzo.optim.moment_counts import further_moments, moments_of
from terrazzo.optim.muon import Muon

__all__ = [
    "HEADS",
    "AdEMAMix",
    "Division",
    "Lion",
    "MatrixOptimizer",
    "Muon",
    "divided",
    "further_moments",
    "hidden_matrices",
    "is_matrix_group",
    "moments_of",
]
