"""The section `model.experts`: the built-in decoder's mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from terrazzo.config.section import KeyDisagreement, Section

__all__ = ["ExpertsConfig"]


class ExpertsConfig(Section):
    """A mixture of experts in each block of the built-in decoder; off without a count."""

    count: int | None = Field(None, gt=0, description="experts of each block; null: one feed-forward for all tokens")
    top_k: int = Field(2, gt=0, description="experts that compute each token")
    ffn_dim: int | None = Field(None, gt=0, description="width of one expert; null: as model.ffn_dim")
    shared: int = Field(0, ge=0, description="experts beside them that compute every token")
    scores: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="the router: `softmax` over all experts, or the `sigmoid` of each"
    )
    normalize: bool = Field(True, description="the weights of a token's experts add up to 1")
    apply: Literal["after", "before"] = Field(
        "after", description="weights multiply what experts give, `after`, or what they are given, `before`"
    )
    balance: Literal["bias", "loss", "none"] = Field(
        "bias",
        description="what keeps experts equally busy: a `bias` on the scores that moves after each step, an auxiliary"
        " `loss`, or `none`",
    )
    bias_rate: float = Field(1e-3, gt=0, description="bias: how far a step moves it")
    loss_weight: float = Field(
        1e-2, gt=0, description="loss: weight of its mean over the tokens of a step, those that are not learnt too"
    )
    z_loss: float = Field(
        0.0, ge=0, description="weight of the squared log-sum-exp of a token's scores, a mean likewise; 0: none"
    )

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        set_here = self.changed_keys()
        if self.count is None:
            for key in set_here:
                yield KeyDisagreement(
                    key, "without model.experts.count: set model.experts.count, such as 8, or remove it"
                )
            return
        if self.top_k > self.count:
            yield KeyDisagreement(
                "top_k", f"{self.top_k} experts compute each token, and there are {self.count}: lower top_k"
            )
        for key, balance in (("bias_rate", "bias"), ("loss_weight", "loss")):
            if key in set_here and self.balance != balance:
                yield KeyDisagreement(
                    key, f"belongs to balance '{balance}', and this one is '{self.balance}': remove it"
                )
