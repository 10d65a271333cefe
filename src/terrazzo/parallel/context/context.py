"""Context parallelism: the ranks of a group share each sequence, and exchange in attention alone.

A rank has some chunks of every sequence (`chunks`). All other modules of a decoder compute each token by itself.
Attention exchanges keys and values, or heads (`attention_modes`), and computes tile by tile (`attention_tiles`).

A token sees the tokens of its own document up to itself. Its document begins at the token's place in the sequence minus
its position in the document, both of which its rank knows. So a model is given positions and no mask, and no mask is
ever as large as a sequence squared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.instrumentation.traffic import Traffic
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.errors import BadInput, Misuse
from terrazzo.given_numbers import is_count
from terrazzo.parallel.context.attention_masks import AttentionMask
from terrazzo.parallel.context.attention_modes import Shared, gather_attention, ring_attention, ulysses_attention
from terrazzo.parallel.context.chunks import Balance, Chunks
from terrazzo.parallel.context.document_places import DocumentPlaces, Documents
from terrazzo.parallel.context.mode_rules import Mode, check_heads, check_names, check_window
from terrazzo.parallel.context.same_sequences import SameSequences
from terrazzo.parallel.exchanges import AxisRanks

__all__ = ["Context"]

_COMPUTED = {"gather": gather_attention, "ulysses": ulysses_attention, "ring": ring_attention}


class Context:
    """How the ranks of a process group share sequences.

    Args:
        group: the ranks that share each sequence, and are given the same ones; their process group, to which they
            connect here, collectively; or None for this rank alone, which has whole sequences and exchanges nothing.
        mode: `gather`, where each rank has the keys and values of all ranks in memory while a layer runs; `ulysses`,
            where each has all tokens of some heads; `ring`, where each has keys and values of two ranks beside its own.
        balance: `head_tail` gives all ranks the same work under a causal mask; with `none` later ranks have more.
        tp: ranks along `tp`, each of which has a share of the heads.

    Attributes:
        ranks: through which they exchange.
        is_simulated: there are no other ranks, and tensors have no values.

    Raises:
        BadInput: an unknown mode or balance.
    """

    is_simulated = False

    def __init__(
        self,
        group: dist.ProcessGroup | AxisRanks | None,
        mode: str = "gather",
        balance: str = "head_tail",
        tp: int = 1,
    ) -> None:
        check_names(mode, balance)
        self.ranks = AxisRanks.of_group(group) if isinstance(group, dist.ProcessGroup) else group or AxisRanks(None)
        self.mode: Mode = cast(Mode, mode)
        self.chunks = Chunks(self.ranks.size, cast(Balance, balance))
        self.rank, self.size, self._tp = self.ranks.rank, self.ranks.size, tp
        self._is_split = True
        self._same = SameSequences(self.ranks, skips=self.is_simulated or self.size == 1)
        self._places = DocumentPlaces(self.ranks, self.chunks, gathers=mode == "ulysses")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied model belongs to the same group."""
        return self

    def split(self, *whole: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of each tensor, `[B, T, ...]`: `[B, T / ranks, ...]`.

        Shift targets before the split: the token after the last one of a chunk is another rank's. What the ranks give
        is compared as the first mask is made, or the first attention begins, which raise `RanksApart` where it
        differs; on a CPU in each forward of a model, what this thread has split since the last
        one. In graphs of a compiler nothing is compared: of blocks that are compiled, their
        masks are made outside; compiled as a whole, the model is given what the caller has compared.

        Raises:
            BadInput: T does not divide into chunks.
        """
        if self.is_split:
            self._same.note(whole)
        return tuple(self.chunks.split(each, self.rank) for each in whole)

    def positions(self, tokens: Tensor) -> Tensor:
        """Positions of this rank's part of `tokens`, `[B, T]`, of one document each: int64 `[B, T / ranks]`."""
        self.chunks.check(tokens.shape[1])
        places = self.chunks.places(self.rank, tokens.shape[1], tokens.device)
        return places.expand(tokens.shape[0], -1)

    def place(self, positions: Tensor, device: torch.device) -> Tensor:
        """This rank's part of `positions`, `[B, T]` in host memory, on a device: int64 `[B, T / ranks]`.

        It is what `split` gives. In the next forward the host knows where documents begin, and need not wait for the
        device.

        Raises:
            BadInput: T does not divide into chunks; positions that are on a device.
        """
        placed = self._places.place(positions, device, self.is_split)
        if self.is_split:
            self._same.note([positions])
        return placed

    def place_prefix(self, prefix: Tensor, device: torch.device) -> Tensor:
        """As `place`, for the lengths of prefixes: int64 `[B, T]` in host memory, of which each rank gets its part."""
        placed = self._places.place_prefix(prefix, device, self.is_split)
        if self.is_split:
            self._same.note([prefix])
        return placed

    def begin_forward(self) -> None:
        """A model's forward begins: under `ulysses` its first mask gathers positions, and the others are of these.

        `share_sequences` has models call it, and `end_forward`.
        """
        if not torch.compiler.is_compiling():
            self._same.begin_forward()
            self._places.begin_forward()

    def end_forward(self) -> None:
        """The forward has ended: the next mask is of other positions."""
        if not torch.compiler.is_compiling():
            self._places.end_forward()

    @contextlib.contextmanager
    def unsplit(self) -> Iterator[None]:
        """Inside of it every rank has whole sequences, its own or the same as others, and nothing is exchanged."""
        before, self._is_split = self._is_split, False
        try:
            yield
        finally:
            self._is_split = before

    def compare(self, before: Label) -> None:
        """As `AxisRanks.compare`, of the ranks that share sequences. Collective where that is."""
        self.ranks.compare(before)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent."""
        return self.ranks.traffic

    @property
    def is_split(self) -> bool:
        """Whether models are given parts of sequences; False inside `unsplit`."""
        return self._is_split and self.size > 1

    def mask(
        self,
        positions: Tensor | None,
        tokens: int,
        window: int | None = None,
        stride: int | None = None,
        prefix: Tensor | None = None,
    ) -> AttentionMask:
        """What this rank's tokens see. Collective the first time, and once in a model's forward on a CPU and under
        `ulysses`.

        The host reads positions and prefix once, and waits for their device unless they are from `place` and
        `place_prefix`. The mask is kept for as long as the positions are, where there is no prefix; under `ulysses`,
        where the positions of other ranks are in it, for their forward and its backward. Outside of these, and with a
        prefix, each call is collective there.

        Args:
            positions: int64 `[B, tokens]`, counted from 0 in each document; None for whole sequences of one document.
            tokens: how many of each sequence this rank has.
            window: how many tokens one sees at most, itself among them; None for all.
            stride: beyond the window a token sees each of its document whose distance is a multiple of it.
            prefix: int64 `[B, tokens]`, of each token how many tokens its document begins with that see each other in
                both directions, as those of a prompt do (prefix LM); 0 for none; None for causal masks.

        Raises:
            Misuse: no positions, or impossible ones, of parts of sequences; an impossible prefix.
            BadInput: the tokens are no whole chunks; a window or stride below 1; a window under `ring`; a stride
                without a window, or a prefix with one.
            RanksApart: on every rank, where it is collective and `split` was given other sequences on some.
        """
        for what, count in (("window", window), ("stride", stride)):
            if count is not None and not is_count(count):
                raise BadInput(f"A mask was asked for with {what} {count!r}: give an int, 1 or more, or None.")
        if stride is not None and window is None:
            raise BadInput(
                f"A mask was asked for with stride {stride} without a window, beyond which it is: give both."
            )
        if prefix is not None and window is not None:
            raise BadInput(
                f"A mask was asked for with a prefix and a window of {window} tokens, beyond which a prompt would see"
                " nothing of itself: give one of the two."
            )
        self.check_positions(positions)
        documents = self._same_documents if self.is_split and positions is not None else self._documents_of
        return documents(positions, prefix, tokens, window).mask(window, stride)

    def _same_documents(
        self, positions: Tensor | None, prefix: Tensor | None, tokens: int, window: int | None
    ) -> Documents:
        """The documents of parts of sequences, which all ranks can read, or none does."""
        if self.mode != "ulysses":
            return self._same.agreed(positions, lambda: self._documents_of(positions, prefix, tokens, window))
        self._same.agreed(positions, lambda: self._check_parts(positions, prefix, tokens, window))
        return self._documents_of(positions, prefix, tokens, window)  # of what is gathered: all refuse the same

    def _documents_of(
        self, positions: Tensor | None, prefix: Tensor | None, tokens: int, window: int | None
    ) -> Documents:
        self._check_parts(positions, prefix, tokens, window)
        return self._places.of(positions, prefix, tokens, self.is_split)

    def attend(  # structure: what attention takes
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        scale: float | None = None,
        *,
        layer: int = 0,
    ) -> Tensor:
        """Attention of this rank's queries to all keys that they see: `[B, heads, tokens, head_dim]`. Collective.

        Args:
            query: `[B, heads, tokens, head_dim]`, this rank's tokens.
            key: `[B, kv_heads, tokens, head_dim]`, of the same tokens; neighbouring query heads share one.
            value: likewise.
            mask: what `self.mask` gave for as many tokens.
            scale: of the scores; by default `1 / sqrt(head_dim)`.
            layer: which of the model's attentions it is: ranks that are at different ones raise. Give each its own.

        Raises:
            BadInput: query heads that are not as many for each key head; under `ulysses`, where the ranks do not divide
                the heads.
            Misuse: keys of other tokens than the queries, as a cache has them; a mask of other tokens, or of another
                mode; in backward, where a gradient is taken with `create_graph=True`.
            RanksApart: on every rank, the first time, where `split` was given other sequences on some; where ranks are
                at different layers.
        """
        if torch.is_autocast_enabled(query.device.type):
            return self._attend_in_autocast(query, key, value, mask, scale, layer)
        self._check_heads_and_tokens(query, key, value, mask)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        tokens = query.shape[2]
        if torch.compiler.is_compiling():  # bounds would be compiled anew for each batch
            mask = mask.of_unknown()
        if not self.is_split:
            return gather_attention(query, key, value, Shared(None, Chunks(1), tokens), mask, scale)
        self._same.compare_first()
        if self.mode == "ulysses":
            self.check_heads(query.shape[1] * self._tp)
        shared = Shared(self.ranks.labelled(Label(Purpose.ACTIVATIONS, layer)), self.chunks, tokens * self.size)
        return _COMPUTED[self.mode](query, key, value, shared, mask, scale)

    def _attend_in_autocast(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, scale: float | None, layer: int
    ) -> Tensor:
        """In the dtype of `torch.autocast`, as torch's own attention, and then outside of it, as backward is."""
        kind = query.device.type

        def cast(tensor: Tensor) -> Tensor:  # autocast leaves fp64 alone
            return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(kind))

        with torch.autocast(kind, enabled=False):
            return self.attend(cast(query), cast(key), cast(value), mask, scale, layer=layer)

    def check_heads(self, heads: int) -> None:
        """Refuse query heads, of the whole model, that the ranks do not divide, which `ulysses` needs.

        Raises:
            BadInput: there.
        """
        check_heads(self.mode, heads, self.size, self._tp)

    def check_window(self, window: int | None) -> None:
        """Refuse sliding windows under `ring`, which would send keys around that no token sees.

        Raises:
            BadInput: there.
        """
        check_window(self.mode, window)

    def _check_heads_and_tokens(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> None:
        if key.shape[2] != query.shape[2] or value.shape[2] != query.shape[2]:
            raise Misuse(
                f"Context-parallel attention was given {query.shape[2]} queries and {key.shape[2]} keys: it takes both"
                " of the same tokens. Turn the model's key-value cache off (use_cache=False)."
            )
        if key.shape[1] != value.shape[1] or query.shape[1] % max(key.shape[1], 1):
            raise BadInput(
                f"Attention was given {query.shape[1]} heads of queries, {key.shape[1]} of keys and {value.shape[1]} of"
                " values: give as many of values as of keys, which divide those of queries."
            )
        batch, tokens = query.shape[0], query.shape[2]
        if mask.runs != tuple(self._places.runs(tokens, self.is_split)) or mask.batch not in (None, 1, batch):
            raise Misuse(
                f"Attention was given a mask that is not of its queries, which are {tokens} tokens each of {batch}"
                " sequences: make it by this context's mask(positions, tokens), of the positions and the number of"
                " these tokens, where they are split and where they are whole."
            )

    def check_positions(self, positions: Tensor | None) -> None:
        """Refuse parts of sequences without positions.

        Raises:
            Misuse: there.
        """
        if positions is None and self.is_split and not self.is_simulated:
            raise Misuse(
                f"The model shares each sequence with {self.size - 1} other ranks, and was given tokens without"
                " position_ids, so it cannot know which part they are. Pass the positions that context.split(...) or"
                " context.positions(...) gives; where every rank has whole sequences, call it inside context.unsplit()."
            )

    def _check_parts(self, positions: Tensor | None, prefix: Tensor | None, tokens: int, window: int | None) -> None:
        if self.is_split and positions is not None:
            if positions.shape[1] != tokens:
                raise Misuse(
                    f"The model was given {tokens} tokens of each sequence and positions of {positions.shape[1]}:"
                    " split both with context.split(tokens, positions)."
                )
            self.check_window(window)
            self.chunks.check(tokens * self.size)
        if prefix is not None and prefix.shape[1] != tokens:
            raise Misuse(
                f"The model was given {tokens} tokens of each sequence and prefix lengths of {prefix.shape[1]}: split"
                " both with context.split(tokens, prefix)."
            )
