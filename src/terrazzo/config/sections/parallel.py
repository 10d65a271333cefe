"""The section `parallel`: what ranks do that share more than data, along the axes tp, cp and pp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from terrazzo.config.section import KeyDisagreement, Section
from terrazzo.messages import did_you_mean
from terrazzo.words import STYLE_NAMES, check_schedule

__all__ = ["ContextConfig", "ParallelConfig", "PipelineConfig", "TensorConfig"]


class ContextConfig(Section):
    """How ranks compute attention over sequences that they share, where `plan.mesh.cp` is more than 1."""

    mode: Literal["gather", "ulysses", "ring"] = Field(
        "gather",
        description="`gather`: each rank gathers a layer's keys and values; `ulysses`: each gets a share of the heads, "
        "which cp must divide; `ring`: keys and values go round, and those of a few ranks are in memory at a time",
    )
    balance: Literal["head_tail", "none"] = Field(
        "head_tail",
        description="`head_tail`: each rank has a part near the start of a sequence and one near its end, and all have "
        "the same work; `none`: one part each, and later ranks have more",
    )


class TensorConfig(Section):
    """How ranks share matrices, where `plan.mesh.tp` is more than 1."""

    plan: dict[str, str] | Literal["auto"] = Field(
        "auto",
        description="`auto`: the model's own plan; or globs over names of its modules, a `*` for one level, to styles: "
        f"{', '.join(f'`{style}`' for style in STYLE_NAMES)}",
    )
    sequence: bool = Field(
        True,
        description="split sequences between matrices too: as much is sent, and fewer activations are kept; "
        "their length must divide by tp",
    )

    @field_validator("plan")
    @classmethod
    def _known_styles(cls, plan: str | dict[str, str]) -> str | dict[str, str]:
        if not plan:
            raise ValueError(
                "give `auto`, or globs and styles such as {'layers.*.mlp': enter, 'layers.*.mlp.up': colwise, "
                "'layers.*.mlp.down': rowwise}"
            )
        for glob, style in plan.items() if isinstance(plan, dict) else ():
            if style not in STYLE_NAMES:
                near = did_you_mean(style, STYLE_NAMES)
                raise ValueError(f"{glob!r} has the style {style!r}.{near} Styles are {', '.join(STYLE_NAMES)}")
        return plan


class PipelineConfig(Section):
    """How ranks take turns that have some layers each, where `plan.mesh.pp` is more than 1."""

    schedule: Literal["1f1b", "gpipe", "zero_bubble"] = Field(
        "1f1b",
        description="`1f1b`: each rank keeps activations of as many micro-batches as there are stages behind it, and "
        "one more; `gpipe`: all forwards before all backwards; `zero_bubble`: gradients of weights are put off to when "
        "a rank would wait",
    )
    chunks: int = Field(1, gt=0, description="stages of each rank; several wait less, and send more, by `1f1b` alone")

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        try:
            check_schedule(self.schedule, self.chunks)
        except ValueError as error:
            yield KeyDisagreement("", str(error))


class ParallelConfig(Section):
    """What ranks do that share more than data."""

    tensor: TensorConfig = TensorConfig()
    context: ContextConfig = ContextConfig()
    pipeline: PipelineConfig = PipelineConfig()
