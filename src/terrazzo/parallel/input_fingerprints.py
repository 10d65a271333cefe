"""What ranks are given that all of them are to be given the same, in numbers that they can compare."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.runtime.private_torch import tree_flatten, tree_leaves

__all__ = ["DRAWN_BY_DATA_RANK", "described", "form_of_inputs", "inputs_in_number", "values_of_inputs"]

DRAWN_BY_DATA_RANK = "drawn by data rank, mesh.get_local_rank('dp_shard'), and not by rank."
"""How batches are, of which ranks are given the same: the end of an edit."""

_PLAIN = (bool, int, float, str, type(None))


def form_of_inputs(inputs: Any) -> int:
    """32 bits of how a model's inputs are nested, and of shapes, dtypes and plain values; all but what tensors hold."""
    leaves, nesting = tree_flatten(inputs)
    return zlib.crc32(repr((str(nesting), [_form_of(leaf) for leaf in leaves])).encode())


def _form_of(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__


def inputs_in_number(inputs: Any) -> int:
    """32 bits of a model's inputs, their form and their values; the host may wait, as for `values_of_inputs`."""
    return form_of_inputs([form_of_inputs(inputs), values_of_inputs(inputs)])


def described(inputs: Any) -> str:
    """What a reader is told of a model's inputs."""
    leaves = tree_leaves(inputs)
    texts = [
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
        if isinstance(leaf, (Tensor, *_PLAIN))
    ]
    return ", ".join(texts) or "nothing"


def values_of_inputs(inputs: Any) -> int:
    """32 bits of what the tensors among a model's inputs hold; the host waits for a device that they are on.

    Floating-point numbers on a device are left out: ranks may have computed them, with another rounding each.
    """
    found = 0
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and _is_looked_at(leaf):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found


def _is_looked_at(values: Tensor) -> bool:
    if values.is_meta or values.layout is not torch.strided:
        return False
    return values.device.type == "cpu" or not (values.is_floating_point() or values.is_complex())
