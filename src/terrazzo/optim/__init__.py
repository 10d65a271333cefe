"""Optimizers beside those of torch, for any loop; `tz.shard` takes them under every plan.

Muon             whole matrices made orthogonal, and AdamW for all else, in one object
hidden_matrices  which parameters of a model are for it
"""

from terrazzo.optim.matrices import MatrixOptimizer, is_matrix_group, matrix_numel
from terrazzo.optim.muon import Muon, hidden_matrices

__all__ = ["MatrixOptimizer", "Muon", "hidden_matrices", "is_matrix_group", "matrix_numel"]
