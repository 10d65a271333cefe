"""Whether the guard can see what it is to look at, and will have a checkpoint to go back to."""

from __future__ import annotations

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.train.settings.plan import build_plan

__all__ = ["check_guard"]


def check_guard(config: Config) -> None:
    """Raise `BadInput` for `guard.replay_every` and `guard.memory_every` where they would see nothing, and for
    `guard.action` 'rollback' in a run that saves nothing before its end.
    """
    guard, mesh = config.guard, config.plan.mesh
    if guard.replay_every is not None and max(mesh.pp, mesh.ep) > 1:
        axis = "pp" if mesh.pp > 1 else "ep"
        raise BadInput(
            f"guard.replay_every is {guard.replay_every}, and plan.mesh.{axis} {getattr(mesh, axis)}: ranks along that"
            " axis compute with what others of it give them, so that a wrong one would not be told from these,"
            f" and they are not compared. Set guard.replay_every=null, or plan.mesh.{axis}=1."
        )
    if guard.action == "rollback" and config.checkpoint.every is None and config.checkpoint.local.folder is None:
        raise BadInput(
            "guard.action is 'rollback', and checkpoint.every is null: there would be no checkpoint to go back to. Set"
            " checkpoint.every, such as 100, or guard.action=skip."
        )
    optim = build_plan(config).optim
    if guard.memory_every is not None and set(optim.shares) != {"device"}:
        raise BadInput(
            f"guard.memory_every is {guard.memory_every}, and offload.optim '{optim.tier}': states away from the device"
            " are not looked at. Set guard.memory_every=null and, for drives, offload.digest=true."
        )
