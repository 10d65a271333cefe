"""What `terrazzo train` refuses of a plan with its tiers. What it refuses of single keys, their verdicts say."""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.dialects.core.dialect import ConfigDocument, Finding, Reading, ReadingContext
from terrazzo.errors import BadInput

__all__ = ["findings"]


def findings(document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """Rows that the mesh cannot have, and states on NVMe without a folder."""
    plan = reading.description.plan
    if plan is None:
        return
    replicas = reading.description.value("mesh.dp_replicate") or 1
    try:
        plan.resolve(["dp_replicate", "dp_shard"] if replicas > 1 else ["dp_shard"])
    except BadInput as error:
        yield Finding("plan", "error", str(error))
    offloaded = {state: place.tier for state, place in plan.places().items() if "nvme" in place.tier}
    if offloaded and not reading.description.value("offload.path"):
        states = ", ".join(offloaded)
        yield Finding("offload.path", "error", f"{states} on nvme needs offload.path: a folder of a local drive.")
