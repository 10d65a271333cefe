"""Whether groups of ranks can train by themselves, as `plan.sync_every` wants it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.train.settings.plan import build_precision, check_rounds

__all__ = ["check_replicas_apart"]


def check_replicas_apart(config: Config) -> None:
    """Raise `BadInput` for `plan.sync_every` without replicas, or with what needs all ranks in every step."""
    every = config.plan.sync_every
    if every is None:
        return
    for problem, edit in _problems(config):
        raise BadInput(f"plan.sync_every is {every}, and {problem}: {edit}, or plan.sync_every=null.")
    check_rounds(config, 0)


def _problems(config: Config) -> Iterator[tuple[str, str]]:
    """Each obstacle, with its edit."""
    mesh, guard, train = config.plan.mesh, config.guard, config.train
    if mesh.dp_replicate == 1:
        yield "there is one group of ranks", "set plan.mesh.dp_replicate to the number of groups, such as 2"
    if (master := build_precision(config).exact_master) != torch.float32:
        yield f"master weights are {str(master).removeprefix('torch.')}", "set precision.master=fp32"
    if config.precision.error_feedback:
        yield "precision.error_feedback would have each group keep residuals", "set precision.error_feedback=false"
    if guard.acts:
        yield "guard judges each step by the gradients of all ranks", "set guard.action=stop and guard.spike=null"
    for name in ("replay_every", "memory_every"):
        if getattr(guard, name) is not None:
            yield f"guard.{name} compares ranks that have other weights within a round", f"set guard.{name}=null"
    if train.check_replicas_every is not None:
        yield (
            "train.check_replicas_every is set, which every outer step does for the groups",
            "set train.check_replicas_every=null",
        )
    if config.model.experts.count is not None:
        yield "model.experts are balanced by the tokens of all ranks", "train a model without experts"
    for axis in ("pp", "ep"):
        if (size := getattr(mesh, axis)) > 1:
            yield f"plan.mesh.{axis} is {size}, which has not been tried within such groups", f"set plan.mesh.{axis}=1"
