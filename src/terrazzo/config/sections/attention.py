"""The section `model.attention`: which tokens those of the built-in decoder see."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from terrazzo.config.section import KeyDisagreement, Section

__all__ = ["AttentionConfig"]


class AttentionConfig(Section):
    """A sliding window or a prefix mask of the built-in decoder; without either a token sees all tokens before it."""

    window: int | None = Field(
        None, gt=0, description="how many tokens one sees at most, itself among them (sliding window); null: all before"
    )
    stride: int | None = Field(
        None, gt=1, description="beyond the window, each token whose distance is a multiple of this; null: none"
    )
    full_every: int | None = Field(
        None, gt=1, description="every so many layers one has no window, the last of so many; null: all have one"
    )

    prefix: bool = Field(
        False,
        description="the tokens of a prompt, those before the first that is learnt in a document, see each other in"
        " both directions (prefix LM)",
    )

    @property
    def is_set(self) -> bool:
        """Whether attention is anything else than causal."""
        return self.prefix or self.window is not None

    @property
    def not_mistral(self) -> str:
        """Name of the first setting beside a window that transformers' Mistral lacks; empty where it has all."""
        return "stride" if self.stride is not None else "layers of other kinds" if self.full_every is not None else ""

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        if self.prefix and (set_here := self.changed_keys("window", "stride", "full_every")):
            yield KeyDisagreement(
                "prefix",
                f"beside {', '.join(set_here)}, within which a prompt would see a part of itself: remove one of them",
            )
            return
        for key in self.changed_keys("stride", "full_every") if self.window is None else ():
            yield KeyDisagreement(
                key, "without model.attention.window: set model.attention.window, such as 1024, or remove it"
            )
