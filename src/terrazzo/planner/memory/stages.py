"""Pipeline stages: which units each holds, and how many micro-batches wait on it for their backward."""

from __future__ import annotations

from functools import lru_cache

from terrazzo.planner.model.shapes import TensorShape, UnitShape
from terrazzo.planner.setup.setup import Setup

__all__ = ["in_flight", "stage_units", "units_of_stage"]


@lru_cache(maxsize=4096)
def units_of_stage(
    units: tuple[UnitShape, ...], tied: bool, stages: int, stage: int
) -> tuple[tuple[UnitShape, int], ...]:
    """`stage_units` of what it depends on."""
    root, blocks = units[0], units[1:]
    own: list[tuple[UnitShape, int]] = []
    tensors = _root_tensors(root, tied, stages, stage)
    if tensors:
        own.append((root if tensors == root.tensors else UnitShape(root.name, tensors), 1))
    layers = sum(unit.count for unit in blocks)
    share, extra = divmod(layers, stages)
    start = stage * share + min(stage, extra)
    stop = start + share + (stage < extra)
    position = 0
    for unit in blocks:
        count = max(0, min(stop, position + unit.count) - max(start, position))
        if count:
            own.append((unit, count))
        position += unit.count
    return tuple(own)


def stage_units(setup: Setup, stage: int) -> tuple[tuple[UnitShape, int], ...]:
    """The units of a pipeline stage with their counts, its part of the root first if it has one.

    The first stage holds the embeddings and learned positions; the last one the head and what is left, a tied head as
    a copy of its own.
    """
    return units_of_stage(setup.model.units, setup.model.tied, setup.mesh.pp, stage)


def _root_tensors(root: UnitShape, tied: bool, stages: int, stage: int) -> tuple[TensorShape, ...]:
    if stages == 1:
        return root.tensors
    first = tuple(tensor for tensor in root.tensors if _looked_up(tensor))
    if stage == 0:
        return first
    if stage < stages - 1:
        return ()
    head = tuple(tensor for tensor in first if tensor.role == "embedding")[:1] if tied else ()
    return tuple(tensor for tensor in root.tensors if not _looked_up(tensor)) + head


def _looked_up(tensor: TensorShape) -> bool:
    """Embeddings, and learned positions, which are vectors in a table."""
    return tensor.role == "embedding" or (tensor.role == "vector" and len(tensor.shape) == 2)


def in_flight(setup: Setup, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, in units of all its blocks.

    Of 1F1B as many as stages are left (arXiv 2104.04473, section 2.2), interleaved on the first stage
    1 + (p - 1) / (p v) times as many (arXiv 2205.05198, section 4.2.3), of GPipe all (arXiv 1811.06965), of ZB-H1 as
    many as there are stages, inputs of linear maps alone of those whose backward has run (arXiv 2401.10241).
    """
    stages, chunks = setup.mesh.pp, setup.virtual_stages
    if setup.pipeline == "gpipe" and stages > 1:
        return float(setup.micro_batches)
    if setup.pipeline == "zero_bubble":
        return float(min(stages, setup.micro_batches))
    if chunks == 1 or stages == 1:
        return float(min(stages - stage, setup.micro_batches))
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return min(warm_up, setup.micro_batches * chunks) / chunks
