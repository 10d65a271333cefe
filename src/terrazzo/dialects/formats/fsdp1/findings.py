"""What FSDP1 refuses or takes otherwise than it looks."""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.dialects.core.dialect import Finding, Reading, ReadingContext

__all__ = ["findings"]


def findings(reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """What FSDP1 refuses of a document, or takes otherwise than it looks."""
    document = reading.document
    strategy = str(document.get("sharding_strategy") or "FULL_SHARD").upper()
    if strategy.endswith("NO_SHARD"):
        yield Finding.warning("sharding_strategy", "NO_SHARD is deprecated in FSDP: use DistributedDataParallel.")
    chosen = ("process_group", "device_mesh", "auto_wrap_policy")
    if "HYBRID" in strategy and not any(document.get(key) for key in chosen):
        text = f"{strategy} needs device_mesh, process_group or auto_wrap_policy: FSDP raises without any of them."
        yield Finding.error("sharding_strategy", text)
    for one, other in (("process_group", "device_mesh"), ("ignored_modules", "ignored_states")):
        if document.get(one) is not None and document.get(other) is not None:
            yield Finding.error(one, f"FSDP raises when both {one} and {other} are given: keep {other}.")
    if not document.get("auto_wrap_policy"):
        text = "without it the whole model is one unit: all weights are gathered at once, and nothing overlaps."
        yield Finding.warning("auto_wrap_policy", text)
    if "backward_prefetch" in document and document["backward_prefetch"] is None:
        yield Finding.warning("backward_prefetch", "none: gathers do not overlap with backward; say BACKWARD_PRE.")
