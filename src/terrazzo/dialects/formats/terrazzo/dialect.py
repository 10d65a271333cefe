"""Terrazzo's own YAML: the hub that every dialect is converted to and from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from terrazzo.config import KEYS as SCHEMA
from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import (
    NO_CONTEXT,
    ConfigDocument,
    Dialect,
    Finding,
    Reading,
    ReadingContext,
    Writing,
)
from terrazzo.dialects.formats.terrazzo.keys import KEYS
from terrazzo.dialects.formats.terrazzo.read import read
from terrazzo.dialects.formats.terrazzo.write import write
from terrazzo.errors import BadInput

__all__ = ["Terrazzo"]


class Terrazzo(Dialect):
    """The configuration of `terrazzo train`."""

    name = "terrazzo"
    title = "Terrazzo YAML"
    suffix = ".yaml"
    keys = KEYS

    def recognises(self, document: ConfigDocument) -> bool:
        """Whether it has Terrazzo's sections alone, and in them mostly Terrazzo's keys, or a plan by its name."""
        sections = {key.partition(".")[0] for key in SCHEMA}
        if not document or not set(document) <= sections:
            return False
        names = [
            f"{section}.{key}" for section, inner in document.items() if isinstance(inner, Mapping) for key in inner
        ]
        known = [name for name in names if name in SCHEMA or name == "plan.mesh"]
        return isinstance(document.get("plan"), str) or 2 * len(known) > len(names) or (bool(known) and len(names) < 4)

    def read(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        return read(document, context)

    def write(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        return write(description, context)

    def findings(self, document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
        """What the trainer refuses of a plan with its tiers. That of single keys is said by their verdicts."""
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
