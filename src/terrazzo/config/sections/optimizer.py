"""The section `optimizer`: what updates the weights."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from terrazzo.config.section import Named, Section

__all__ = ["MuonConfig", "OptimizerConfig"]


class MuonConfig(Section):
    """Under `optimizer.name: Muon`, of the matrices that it updates; the other keys of `optimizer` are AdamW's, of all
    else.
    """

    lr: float | None = Field(None, ge=0, description="learning rate of matrices at its peak; null: optimizer.lr")
    weight_decay: float | None = Field(None, ge=0, description="of matrices; null: optimizer.weight_decay")
    momentum: float = Field(0.95, ge=0, lt=1, description="share of the momentum that stays in a step")
    nesterov: bool = Field(True, description="look ahead by the momentum")
    ns_steps: int = Field(5, ge=1, lt=100, description="Newton-Schulz iterations that make a matrix orthogonal")
    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="by a matrix's sides: `match_rms_adamw`, which suits a rate of AdamW's; `original`, as by Jordan",
    )
    matrices: list[str] = Field(
        default=[], description="name globs of further matrices, whatever they are in the model"
    )
    others: list[str] | None = Field(
        None, description="name globs of what AdamW steps all the same; null: heads by their usual names"
    )


class OptimizerConfig(Named):
    """A class of torch.optim or tz.optim by name."""

    name: str = Field(
        "AdamW", description="class of torch.optim that is elementwise, or Muon, Lion or AdEMAMix of tz.optim"
    )
    lr: float = Field(3e-4, ge=0, description="learning rate at its peak")
    weight_decay: float = Field(0.1, ge=0, description="of the parameters that `decay` names")
    decay: Literal["matrices", "all"] = Field(
        "matrices",
        description="what weight decay is for: `matrices`, parameters of two or more dimensions, so no norm or bias;"
        " or `all`",
    )
    no_decay: list[str] = Field(default=[], description="name globs that are kept out of weight decay all the same")
    options: dict[str, Any] = Field(default={}, description="further arguments of the class; of Muon those of AdamW")
    muon: MuonConfig = MuonConfig()
