"""How the ranks of a model in stages reach each other, from step to step."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from terrazzo.engine import Engine, parameters_by_names
from terrazzo.marks import SHARES_EXPERTS, SHARES_MATRICES, SHARES_SEQUENCES, Mark
from terrazzo.parallel.pipeline.failures import Failures
from terrazzo.parallel.pipeline.messages import Messages
from terrazzo.parallel.pipeline.pipeline_stages import PipelineStages

__all__ = ["StageLinks", "exchanges_inside", "links_of"]


class StageLinks(NamedTuple):
    """Messages between the stages of a model, and the notes of ranks that have failed."""

    messages: Messages
    failures: Failures


_LINKS = Mark[StageLinks]("terrazzo_stage_links")


def links_of(model: nn.Module, engine: Engine, stages: PipelineStages) -> StageLinks:
    """The links of a model in stages, made at its first step. Collective that time."""
    links = _LINKS.find(model)
    if links is None:
        axes = engine.axes
        along, count = axes.along(axes.stage_axis[0]), len(stages.bounds)
        sharing = sorted({*map(stages.tied_ranks, parameters_by_names(model))} - {()})
        messages = Messages(along, count, axes.device, sharing)
        links = _LINKS.leave(model, StageLinks(messages, Failures(axes, count)))
    return links


def exchanges_inside(model: nn.Module, engine: Engine) -> bool:
    """Whether a model's forward and backward exchange with other ranks: split weights, or along `tp`, `cp` or `ep`."""
    marks = SHARES_MATRICES, SHARES_SEQUENCES, SHARES_EXPERTS
    return engine.schedule.meet is not None or any(any(each.all_in(model)) for each in marks)
