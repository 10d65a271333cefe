"""Sliding windows of the built-in decoder, layer by layer, or its prefix mask."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import BadInput

__all__ = ["AttentionPattern"]


@dataclass(frozen=True)
class AttentionPattern:
    """Attention within a sliding window (Longformer, arXiv 2004.05150), in all layers or in most; or a prefix mask.

    Attributes:
        window: the most tokens that a token sees, itself included; None for all.
        stride: beyond the window a token sees those whose distance is a multiple of this (Sparse Transformer, arXiv
            1904.10509); None for nothing beyond it.
        full_every: the last of every so many layers has no window; None if all have one.
        prefix: in all layers the tokens of a document's prompt see each other in both directions (prefix LM, arXiv
            1910.10683, section 3.2.1).

    Raises:
        BadInput: a window or a stride of less than a token, or a `full_every` below 2; a prefix with any of these, or
            nothing at all.
    """

    window: int | None = None
    stride: int | None = None
    full_every: int | None = None
    prefix: bool = False

    def __post_init__(self) -> None:
        if self.prefix == (self.window is not None) or (self.prefix and (self.stride or self.full_every)):
            raise BadInput("model.attention is a prefix mask or one within a window: set prefix, or window, alone.")
        for name, value, least in (("window", self.window, 1), ("stride", self.stride, 2)):
            if value is not None and value < least:
                raise BadInput(f"model.attention.{name} is {value} tokens; give {least} or more.")
        if self.full_every is not None and self.full_every < 2:
            raise BadInput(
                f"model.attention.full_every is {self.full_every}; give 2 or more, or leave model.attention out for"
                " layers that all see everything."
            )

    def is_full(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has no window."""
        return self.full_every is not None and (layer + 1) % self.full_every == 0

    def seen(self, layer: int) -> tuple[int | None, int | None]:
        """Window and stride of a layer, counted from 0."""
        return (None, None) if self.is_full(layer) else (self.window, self.stride)

    def attended(self, layer: int, sequence_length: int) -> int:
        """Tokens that a token sees in a layer, counted from 0, without regard to causality."""
        window, stride = self.seen(layer)
        near = min(window or sequence_length, sequence_length)
        return near + ((sequence_length - near) // stride if stride else 0)
