"""Tensor parallelism: ranks have parts of the same matrices."""
