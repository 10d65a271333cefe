"""Names of the axes of a mesh, and families of parameters: over which of these axes each sums its gradients."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

__all__ = [
    "DATA_AXES",
    "REPLICA_AXIS",
    "SAME_DATA_AXES",
    "STAGE_AXIS",
    "Family",
    "seeing_other_data",
    "seeing_same_data",
]

DATA_AXES = ("dp_shard", "cp", "dp_replicate")
"""Mesh axes along which ranks see different data, innermost first: the order in which `D` cuts a state."""
REPLICA_AXIS = "dp_replicate"
"""The data axis whose groups of ranks may train by themselves."""
SAME_DATA_AXES = ("tp",)
"""Mesh axes along which ranks see the same data."""
STAGE_AXIS = "pp"
"""The mesh axis along which ranks have other parameters, one stage of a pipeline after the other."""


def seeing_same_data(axes: Iterable[str]) -> tuple[str, ...]:
    """Those of the axes along which ranks see the same data."""
    return tuple(axis for axis in axes if axis in SAME_DATA_AXES)


def seeing_other_data(axes: Iterable[str]) -> tuple[str, ...]:
    """Those of the axes along which ranks see other data, of axes over which gradients are summed."""
    return tuple(axis for axis in axes if axis not in SAME_DATA_AXES)


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
