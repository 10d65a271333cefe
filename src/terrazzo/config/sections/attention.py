"""The section `model.attention`: how far the tokens of the built-in decoder see."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from terrazzo.config.section import Section

__all__ = ["AttentionConfig"]


class AttentionConfig(Section):
    """A sliding window in the attention of the built-in decoder; without one a token sees all tokens before it."""

    window: int | None = Field(
        None, gt=0, description="how many tokens one sees at most, itself among them (sliding window); null: all before"
    )
    stride: int | None = Field(
        None, gt=1, description="beyond the window, each token whose distance is a multiple of this; null: none"
    )
    full_every: int | None = Field(
        None, gt=1, description="every so many layers one has no window, the last of so many; null: all have one"
    )

    @property
    def not_mistral(self) -> str:
        """Name of the first setting here that transformers' Mistral lacks; empty where it has all of them."""
        return "stride" if self.stride is not None else "layers of other kinds" if self.full_every is not None else ""

    def _disagreements(self) -> Iterator[str]:
        if self.window is None and (set_here := self.changed_keys("stride", "full_every")):
            yield f"{', '.join(set_here)} without attention.window: set it, such as 1024, or remove the section"
