"""Fingerprints of a model's inputs, which ranks compare where all of them must have the same, and when they do.

Ranks along `tp`, `cp` and `pp` must be given the same batches: else sums are wrong, without an error. On CPUs what
batches hold is compared in every forward along `tp` and `cp`, in every step along `pp`, by one small message. On other
devices, for which a host would have to wait, that is so the first time alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.private_torch import tree_flatten, tree_leaves, tree_map

__all__ = [
    "DRAWN_BY_DATA_RANK",
    "compares_values",
    "fingerprint_of",
    "form_fingerprint",
    "inputs_as_text",
    "looked_into",
    "values_fingerprint",
]

DRAWN_BY_DATA_RANK = "drawn by data rank, mesh.get_local_rank('dp_shard'), and not by rank."
"""How to draw batches that are the same on several ranks: the end of an error's message."""

_PLAIN = (bool, int, float, str, type(None))


def looked_into(values: Any) -> Any:
    """The same, with what is in dataclasses, namespaces and mappings that torch takes for leaves in plain dicts."""

    def unfold(leaf: Any) -> Any:
        if isinstance(leaf, (Tensor, *_PLAIN)):
            return leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {each.name: getattr(leaf, each.name, None) for each in dataclasses.fields(leaf)}
        elif isinstance(leaf, SimpleNamespace):
            fields = vars(leaf)
        elif isinstance(leaf, Mapping):
            fields = dict(leaf)
        else:
            return leaf
        return {type(leaf).__name__: looked_into(fields)}

    return tree_map(unfold, values)


def compares_values(device: torch.device, before: bool) -> bool:
    """Whether ranks compare what batches on a device hold now.

    Args:
        before: whether they have compared some of this kind.
    """
    return device.type == HOST.type or not before


def form_fingerprint(inputs: Any) -> int:
    """32 bits of the nesting, shapes, dtypes and plain values of a model's inputs, but not of what tensors hold."""
    return _form_fingerprint(*tree_flatten(looked_into(inputs)))


def _form_fingerprint(leaves: Sequence[Any], nesting: object) -> int:
    return zlib.crc32(repr((str(nesting), [_form_of(leaf) for leaf in leaves])).encode())


def _form_of(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__


def fingerprint_of(inputs: Any) -> int:
    """32 bits of the form and the values of a model's inputs. The host may wait, as for `values_fingerprint`."""
    leaves, nesting = tree_flatten(looked_into(inputs))
    return form_fingerprint([_form_fingerprint(leaves, nesting), _values_fingerprint(leaves)])


def inputs_as_text(inputs: Any) -> str:
    """A model's inputs as text: dtypes and shapes of tensors, and plain values."""
    leaves = tree_leaves(looked_into(inputs))
    texts = [
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
        if isinstance(leaf, (Tensor, *_PLAIN))
    ]
    return ", ".join(texts) or "nothing"


def values_fingerprint(inputs: Any) -> int:
    """32 bits of what the tensors in a model's inputs hold. The host waits for their device.

    Floating-point numbers on a device are left out: ranks may have computed them, with another rounding each.
    """
    return _values_fingerprint(tree_leaves(looked_into(inputs)))


def _values_fingerprint(leaves: Iterable[Any]) -> int:
    fingerprint = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor) and _is_looked_at(leaf):
            flat = leaf.detach().to(HOST).contiguous().reshape(-1)
            fingerprint = zlib.crc32(flat.view(torch.uint8).numpy().data, fingerprint)
    return fingerprint


def _is_looked_at(values: Tensor) -> bool:
    if values.is_meta or values.layout is not torch.strided:
        return False
    return values.device.type == "cpu" or not (values.is_floating_point() or values.is_complex())
