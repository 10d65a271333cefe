"""Whether each group of ranks that trains by itself, as `plan.sync_every` wants it, has samples."""

from __future__ import annotations

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.train.settings.plan import empty_rows

__all__ = ["check_samples_of_groups"]


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
