"""Facts that ranks compare before anything is allocated: versions, the model and the optimizers that each has."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.consensus.digest import digest
from terrazzo.engine.consensus.joint_checks import check_alike
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.optim.stock.settings import NOT_HYPER
from terrazzo.engine.optim.stock.template import has_values
from terrazzo.engine.partition.unit_members import UnitSpec

__all__ = ["ComparedFacts", "buffer_facts", "check_versions", "model_facts", "optimizer_facts", "versions"]


def check_versions(axes: Axes) -> None:
    """Refuse ranks that run different versions. Call it before anything else is exchanged.

    Raises:
        BadInput: on every rank.
    """
    check_alike(axes, versions(), axes.whole_mesh, "Install the same on every machine.")


@functools.cache
def _own_version() -> str:
    """Version of Terrazzo here. It is looked up in installed files, which takes as long as some models."""
    try:
        return version("terrazzo")
    except PackageNotFoundError:  # the code is here all the same, on Python's path
        return "source"


def versions() -> dict[str, object]:
    """Versions that must be the same on all ranks."""
    python = "{}.{}".format(*sys.version_info)
    return {"terrazzo version": _own_version(), "torch version": torch.__version__, "python version": python}


@dataclass(frozen=True)
class ComparedFacts:
    """Facts that ranks must have been told alike, by what messages call them.

    Attributes:
        told: of all ranks.
        of_stage: of those with the same stage of the model.
    """

    told: Mapping[str, object]
    of_stage: Mapping[str, object]

    def __or__(self, other: ComparedFacts) -> ComparedFacts:
        return ComparedFacts({**self.told, **other.told}, {**self.of_stage, **other.of_stage})

    def check_alike(self, axes: Axes) -> None:
        """Compare them. Collective.

        Raises:
            BadInput: on every rank, naming what differs.
        """
        check_alike(axes, {**self.told, **self.of_stage}, axes.same_stage)
        check_alike(axes, self.told, axes.stage_axis)


def optimizer_facts(optimizers: Sequence[Optimizer]) -> ComparedFacts:
    """What optimizers are, and what they keep already: each rank goes on with its own."""
    return ComparedFacts(
        {"optimizer": [*map(_class_and_settings, optimizers)]}, {"optimizer state": [*map(_state_digests, optimizers)]}
    )


def _class_and_settings(optimizer: Optimizer) -> list[object]:
    """The class of an optimizer and the hyper-parameters of its groups."""
    plain = (bool, int, float, str, type(None), list, tuple)
    numbers = [
        {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    groups = [{k: v for k, v in g.items() if k not in NOT_HYPER and isinstance(v, plain)} for g in numbers]
    return [type(optimizer).__name__, *groups]


def _state_digests(optimizer: Optimizer) -> list[object]:
    stepped = [optimizer.state.get(each, {}) for group in optimizer.param_groups for each in group["params"]]
    return [
        [number, {kind: int(digest(v)) if isinstance(v, Tensor) else v for kind, v in state.items()}]
        for number, state in enumerate(stepped)
        if state and has_values(state)
    ]


def model_facts(specs: Sequence[UnitSpec]) -> dict[str, dict[str, object]]:
    """Names, shapes, dtypes and groups of every unit's parameters, and their order, for `check_alike`."""
    return {
        spec.name: {
            **{
                m.name: {
                    "shape": list(m.shape),
                    "dtype": str(m.parameter.dtype),
                    "requires_grad": m.trainable,
                    "group": m.group,
                    "family": m.family.value,
                }
                for m in spec.members
            },
            "order": [m.name for m in spec.members],
        }
        for spec in specs
    }


def buffer_facts(model: nn.Module) -> list[list[object]]:
    """Names, shapes and dtypes of a model's buffers, in their order, for `check_alike`: the first rank's are sent."""
    return [[name, list(buffer.shape), str(buffer.dtype)] for name, buffer in model.named_buffers()]
