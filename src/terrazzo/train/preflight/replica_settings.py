"""Whether groups of ranks can train by themselves, as `plan.sync_every` wants it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.train.settings.plan import build_precision, check_rounds, empty_rows

__all__ = ["check_replicas_apart", "check_samples_of_groups"]


def check_replicas_apart(config: Config) -> None:
    """Raise `BadInput` for `plan.sync_every` without replicas, or with what needs all ranks in every step."""
    every = config.plan.sync_every
    if every is None:
        return
    for problem, edit in _problems(config):
        raise BadInput(f"plan.sync_every is {every}, and {problem}: {edit}, or plan.sync_every=null.")
    check_rounds(config, 0)


def check_samples_of_groups(config: Config, world_size: int) -> None:
    """Raise `BadInput` if a group would have no sample in any step, whose weights would count in the mean."""
    if config.plan.sync_every is None:
        return
    batch, mesh = config.batch, config.plan.mesh
    groups, rows = mesh.groups(world_size), batch.global_batch + empty_rows(batch, world_size, mesh)
    if idle := groups - -(-batch.global_batch * groups // rows):
        raise BadInput(
            f"batch.global_batch {batch.global_batch} is {rows // groups} samples for each of the first groups, and"
            f" leaves none to {idle} of the {groups} groups that train by themselves (plan.sync_every): set"
            f" batch.global_batch={rows}, or start fewer groups (plan.mesh.dp_replicate)."
        )


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
