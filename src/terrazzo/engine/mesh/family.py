"""The axes of a mesh by name, and families of parameters: over which axes each sums its gradients."""

from __future__ import annotations

import enum
from collections.abc import Sequence

__all__ = ["DATA_AXES", "REPLICAS", "SAME_DATA_AXES", "STAGES", "Family"]

DATA_AXES = ("dp_shard", "cp", "dp_replicate")
"""Mesh axes along which ranks see different data, innermost first: the order in which `D` cuts a state."""
REPLICAS = "dp_replicate"
"""The data axis whose groups of ranks may train by themselves."""
SAME_DATA_AXES = ("tp",)
"""Mesh axes along which ranks see the same data."""
STAGES = "pp"
"""The mesh axis along which ranks have other parameters, one stage of a pipeline after the other."""


class Family(enum.StrEnum):
    """Parameters whose gradients are summed over the same axes. One flat space holds those of one family alone."""

    DENSE = "dense"
    SHARED = "shared"
    EXPERT = "expert"

    def summed_over(self, data: Sequence[str]) -> tuple[str, ...]:
        """The axes over which its gradients are summed.

        Args:
            data: the data axes of the mesh, innermost first.
        """
        return (*self.renamed(data), *(("tp",) if self is Family.SHARED else ()))

    def renamed(self, data: Sequence[str]) -> tuple[str, ...]:
        """The axes over which its states are split where those of dense parameters are over these data axes."""
        return tuple("edp" if self is Family.EXPERT and axis == "dp_shard" else axis for axis in data)

    @property
    def cut_along(self) -> str | None:
        """The axis along which ranks may have other parts of one; None where all have the same."""
        return {Family.DENSE: "tp", Family.SHARED: None, Family.EXPERT: "ep"}[self]
