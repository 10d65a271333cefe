"""What `terrazzo train` refuses of its configuration beyond single keys, of which their verdicts say it."""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.config import config_problems
from terrazzo.dialects.core.description import TIER_PATHS, Description
from terrazzo.dialects.core.dialect import Finding, Reading, ReadingContext
from terrazzo.dialects.core.mesh import row_fault
from terrazzo.errors import BadInput

__all__ = ["findings"]


def findings(reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """Rows that the mesh cannot have, and what sections say together."""
    yield from _mesh(reading.description)
    yield from _folder(reading.description)
    refused = [verdict.key for verdict in reading.verdicts if verdict.kind == "refused"]
    for key, words in config_problems(reading.document):
        said = (f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.") for other in refused)
        if not any(said):  # else verdicts of the key, its section or what is in it say so
            yield Finding.error(key, f"`terrazzo train`: {words}")


def _folder(description: Description) -> Iterable[Finding]:
    path = description["offload.path"]
    if any("nvme" in str(description.value(tier)) for tier in TIER_PATHS) and not path.value:
        yield Finding.error(path.key or "offload.path", "states are on NVMe, and no folder is named for them")


def _mesh(description: Description) -> Iterable[Finding]:
    """What the mesh or a tier rules out of the row. Of one that no mesh can have, `verbs.check` says it."""
    plan = description.plan
    axes = ["dp_replicate", "dp_shard"] if description.value("mesh.dp_replicate") != 1 else ["dp_shard"]
    if plan is None or row_fault(plan):
        return
    if plan.groups and len(axes) == 1:
        yield Finding.error(
            "plan",
            f"{plan.name} splits states inside of groups of ranks, and this run has one group: set"
            " plan.mesh.dp_replicate to the number of groups, such as 2, or plan=zero3",
        )
        return
    try:
        plan.resolve(axes)
    except BadInput as error:
        yield Finding.error("plan", str(error))
