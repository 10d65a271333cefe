"""What is known of the tensors of one forward: which have channels in parts, and which are computed of a part alone.

A tensor of which nothing is known is taken for one that all ranks have whole. So is none whose channels have come by a
way that no mode of torch sees: one that shares memory with a tensor to which channels were written, one inside of
`torch.func`'s transforms, and one whose graph leads back to channels past all that was seen, such as what a function of
`torch.jit.script` computes with gradients. Of code that is compiled, as that of models often is, this is a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from terrazzo.engine.runtime.private_torch import without_transform
from terrazzo.errors import Misuse
from terrazzo.messages import warn
from terrazzo.parallel.tensor.channels.cut_dim import ChannelCut

__all__ = ["ChannelMarks"]

_FAR = 64
"""How many nodes back a graph is followed."""


class ChannelMarks:
    """Marks on the tensors of one forward."""

    def __init__(self) -> None:
        self._cuts: Any = WeakIdKeyDictionary()
        self._mixed: Any = WeakIdKeyDictionary()
        self._written: Any = WeakIdKeyDictionary()  # by storage: why another tensor of it is refused
        self._warned: set[str] = set()
        self._nodes: dict[Any, str] = {}  # of autograd's graph: which column's; empty: that of what was seen without

    def cuts_of(self, tensor: Tensor) -> tuple[ChannelCut, ...]:
        """The dim that ranks have in parts; where that is not known, all that it may be; empty: none."""
        cuts: tuple[ChannelCut, ...] = self._cuts.get(tensor, ())
        return cuts

    def mixed_of(self, tensor: Tensor) -> Misuse | None:
        """Why no rank may compute with a tensor."""
        error: Misuse | None = self._mixed.get(tensor)
        return error

    def note_cut(self, tensor: Tensor, cuts: Sequence[ChannelCut], given: Iterable[Tensor] = ()) -> None:
        """Channels are in a tensor, which has been written to if it was `given`."""
        self._note_written(tensor, _misuse(cuts[0].name, "writes through a view of another tensor, or .data"), given)
        self._cuts[tensor] = tuple(cuts)
        self._note_node(tensor, cuts[0].name)

    def note_mixed(self, tensor: Tensor, error: Misuse, given: Iterable[Tensor] = ()) -> None:
        """A tensor is computed of a part of the channels as if that were all."""
        self._note_written(tensor, error, given)
        self._mixed[tensor] = error

    def note_seen(self, tensor: Tensor) -> None:
        """A tensor is what it is known for: without marks, all ranks have it whole."""
        if tensor not in self._cuts:
            self._note_node(tensor, "")

    def refusal(self, tensor: Tensor) -> Misuse | None:
        """Why a tensor may not be taken for one that all ranks have whole."""
        if tensor in self._cuts:
            return None
        if (inner := without_transform(tensor)) is not tensor:
            cuts = self.cuts_of(inner)
            return _misuse(cuts[0].name, "torch.vmap, or another transform of torch.func") if cuts else None
        if len(self._written) and (storage := _storage_of(tensor)) in self._written:
            error: Misuse = self._written[storage]
            return error
        column, is_compiled = self._column_behind(tensor)
        if not column:
            return None
        self.note_seen(tensor)
        if not is_compiled:
            return _misuse(column, "a function that asks no mode of torch, such as one of torch.jit.script")
        if column not in self._warned:
            self._warned.add(column)
            warn(_text(column, "a function that is compiled"))
        return None

    def _note_node(self, tensor: Tensor, column: str) -> None:
        if tensor.grad_fn is not None:
            self._nodes[tensor.grad_fn] = column

    def _note_written(self, tensor: Tensor, error: Misuse, given: Iterable[Tensor]) -> None:
        is_first = tensor not in self._cuts and tensor not in self._mixed
        if is_first and any(each is tensor for each in given):
            self._written[_storage_of(tensor)] = error

    def _column_behind(self, tensor: Tensor) -> tuple[str, bool]:
        """The column to whose channels a graph leads, past what was not seen, or none; whether by compiled code."""
        nodes, known, is_compiled = [tensor.grad_fn], set[Any](), False
        while nodes and len(known) < _FAR:
            node = nodes.pop(0)
            if node is None or node in known:
                continue
            known.add(node)
            if self._nodes.get(node):
                return self._nodes[node], is_compiled
            if node not in self._nodes and not _is_of_this_package(node):
                is_compiled |= type(node).__name__.startswith("CompiledFunction")
                nodes += [each for each, _ in node.next_functions]
        return "", False


def _is_of_this_package(node: Any) -> bool:
    """Whether a function of this package has made a tensor: what ranks exchange in it is its own matter."""
    return getattr(getattr(node, "_forward_cls", None), "__module__", "").startswith("terrazzo.")


def _storage_of(tensor: Tensor) -> Any:
    return tensor.untyped_storage() if tensor.layout is torch.strided else tensor


def _misuse(column: str, way: str) -> Misuse:
    return Misuse(_text(column, way))


def _text(column: str, way: str) -> str:
    return (
        f"The model's forward computes with what {column!r}, of style 'colwise', returns, by {way}: there it is not "
        "followed which channels ranks have. Compute with the tensors themselves, and by torch's functions; or say "
        "how a function's dims go, by terrazzo.parallel.declare; or give the matrices around it the styles "
        "'colwise_gather_output' and 'rowwise_split_input', so that every rank has all channels between them."
    )
