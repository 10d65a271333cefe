"""Where documents begin in the sequences that ranks share, and their prefixes end: read from positions and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from terrazzo.engine import inside_backward
from terrazzo.engine.labels.label import Label
from terrazzo.errors import BadInput
from terrazzo.parallel.context.attention_masks import AttentionMask
from terrazzo.parallel.context.chunks import Chunks, TokenRun
from terrazzo.parallel.context.given_positions import check_begins, check_prefix, places_of
from terrazzo.parallel.context.tensor_memo import TensorMemo
from terrazzo.parallel.exchanges import AxisRanks

__all__ = ["DocumentPlaces", "Documents"]


@dataclass(frozen=True)
class Documents:
    """The documents of the tokens whose attention a rank computes, its own or, under `ulysses`, all of a sequence.

    Attributes:
        runs: where the tokens are in the sequence.
        begins: the place where each token's document begins, int64 `[B, tokens]`; None for sequences of one document.
        prefix_ends: the place behind the prefix of each token's document, likewise; None without prefixes.
        host_begins, host_ends: the values of both in host memory.
    """

    runs: Sequence[TokenRun]
    begins: Tensor | None = None
    host_begins: Tensor | None = None
    prefix_ends: Tensor | None = None
    host_ends: Tensor | None = None
    _masks: dict[tuple[int | None, int | None], AttentionMask] = field(default_factory=dict)

    def mask(self, window: int | None, stride: int | None) -> AttentionMask:
        """What the tokens see, within a window and beyond it; made once."""
        if (window, stride) not in self._masks:
            mask = AttentionMask.of(self.runs, self.begins, self.host_begins, window, stride)
            if self.prefix_ends is not None and self.host_ends is not None:
                mask = mask.with_prefixes(self.prefix_ends, self.host_ends)
            self._masks[window, stride] = mask
        return self._masks[window, stride]


@dataclass(frozen=True)
class _ReadIn:
    """What was read of the same positions.

    Attributes:
        forward: in which; None outside of one.
        documents: by how many tokens of each sequence they are, and whether these are split.
    """

    forward: object | None
    documents: dict[tuple[int, bool], Documents] = field(default_factory=dict)


class DocumentPlaces:
    """Reads positions and lengths of prefixes, of which the host remembers what it need not wait for.

    The documents of positions are remembered, for all layers. Under `ulysses` other ranks' positions are in them, of
    which a rank cannot know whether they are still the same: there they are remembered in the forward that has gathered
    them, and in backward, which may recompute a part of it.

    Args:
        gathers: a rank computes attention of whole sequences (`ulysses`).
    """

    def __init__(self, ranks: AxisRanks, chunks: Chunks, gathers: bool) -> None:
        self._ranks, self._chunks, self._gathers = ranks, chunks, gathers
        self._forward: object | None = None
        self._documents = TensorMemo[_ReadIn]()
        self._placed_begins = TensorMemo[Tensor]()  # of whole sequences, in host memory
        self._placed_prefix = TensorMemo[Tensor]()  # likewise

    def place(self, positions: Tensor, device: torch.device, is_split: bool) -> Tensor:
        """See `Context.place`."""
        placed = self._placed(positions, device, is_split, "place was given positions")
        begins = torch.arange(positions.shape[1]) - positions  # anew: a loader may fill the same memory again
        self._placed_begins.keep(placed, begins)
        return placed

    def place_prefix(self, prefix: Tensor, device: torch.device, is_split: bool) -> Tensor:
        """See `Context.place_prefix`."""
        placed = self._placed(prefix, device, is_split, "place_prefix was given lengths")
        self._placed_prefix.keep(placed, prefix.clone())
        return placed

    def _placed(self, whole: Tensor, device: torch.device, is_split: bool, what: str) -> Tensor:
        if whole.device.type != "cpu":
            raise BadInput(
                f"Context.{what} that are on {whole.device}, from which the host would have to wait for them: give"
                " those of the host's memory, or take context.split(...)."
            )
        own = self._chunks.split(whole, self._ranks.rank) if is_split else whole
        own = own.clone() if own is whole else own  # or what a loader writes there later would be of the same memory
        return (own.pin_memory() if device.type != "cpu" else own).to(device, non_blocking=True)

    def begin_forward(self) -> None:
        """A model's forward begins, in which nobody changes its positions."""
        self._forward = object()

    def end_forward(self) -> None:
        """The forward has ended."""
        self._forward = None

    def runs(self, tokens: int, is_split: bool) -> list[TokenRun]:
        """Where the tokens are whose attention this rank computes, of sequences of which it has `tokens`."""
        if not is_split:
            return [TokenRun(0, 0, tokens)]
        length = tokens * self._ranks.size
        return [TokenRun(0, 0, length)] if self._gathers else self._chunks.runs(self._ranks.rank, length)

    def of(self, positions: Tensor | None, prefix: Tensor | None, tokens: int, is_split: bool) -> Documents:
        """The documents of `tokens` of each sequence, of one document without positions.

        Under `ulysses` it is collective where it reads something, which is once in a forward without a prefix.
        """
        if positions is None and prefix is None:
            return Documents(self.runs(tokens, is_split))
        if positions is None or prefix is not None:
            return self._read(positions, prefix, tokens, is_split)
        known = self._documents.of(positions, self._forward)
        if known is None or (is_split and self._gathers and not self._is_same_forward(known)):
            self._documents.keep(positions, known := _ReadIn(self._forward), self._forward)
        if (tokens, is_split) not in known.documents:
            known.documents[tokens, is_split] = self._read(positions, None, tokens, is_split)
        return known.documents[tokens, is_split]

    def _is_same_forward(self, known: _ReadIn) -> bool:
        return inside_backward() or known.forward is self._forward is not None

    def _read(self, positions: Tensor | None, prefix: Tensor | None, tokens: int, is_split: bool) -> Documents:
        length, runs = tokens * self._ranks.size if is_split else tokens, self.runs(tokens, is_split)
        host_begins = self._known(self._placed_begins, positions, is_split)
        host_prefix = self._known(self._placed_prefix, prefix, is_split)
        if positions is None:
            assert prefix is not None, "one of them says something"
            begins, host_begins = torch.zeros_like(prefix), torch.zeros(prefix.shape, dtype=prefix.dtype)
        else:
            own = self._chunks.runs(self._ranks.rank, length) if is_split else runs
            begins = places_of(own, positions.device) - positions
        if is_split and self._gathers:
            begins, prefix = self._gathered(begins, prefix)
        host_begins = begins.cpu() if host_begins is None else host_begins
        check_begins(runs, host_begins)
        if prefix is None:
            return Documents(runs, begins, host_begins)
        host_ends = host_begins + (prefix.cpu() if host_prefix is None else host_prefix)
        check_prefix(runs, host_begins, host_ends, length)
        return Documents(runs, begins, host_begins, begins + prefix, host_ends)

    def _gathered(self, begins: Tensor, prefix: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Both of whole sequences. Neither is as long as 2^31, so that they share a message."""
        own = begins if prefix is None else begins + (prefix.long() << 32)
        whole = self._chunks.in_order(self._ranks.labelled(Label()).all_gather(own), dim=1)
        return (whole, None) if prefix is None else (whole & (2**32 - 1), whole >> 32)

    def _known(self, memo: TensorMemo[Tensor], placed: Tensor | None, is_split: bool) -> Tensor | None:
        """What the host knows of a tensor that was placed, and is unchanged."""
        if placed is None or (whole := memo.of(placed)) is None:
            return None
        return self._chunks.split(whole, self._ranks.rank) if is_split and not self._gathers else whole
