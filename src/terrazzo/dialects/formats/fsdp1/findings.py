"""What FSDP1 refuses or takes otherwise than it looks."""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.dialects.core.dialect import ConfigDocument, Finding, Reading, ReadingContext

__all__ = ["findings"]


def findings(document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """All of them."""
    strategy = str(document.get("sharding_strategy") or "FULL_SHARD").upper()
    if strategy.endswith("NO_SHARD"):
        yield Finding("sharding_strategy", "warning", "NO_SHARD is deprecated in FSDP: use DistributedDataParallel.")
    chosen = ("process_group", "device_mesh", "auto_wrap_policy")
    if "HYBRID" in strategy and all(document.get(key) is None for key in chosen):
        text = f"{strategy} needs device_mesh, process_group or auto_wrap_policy: FSDP raises without any of them."
        yield Finding("sharding_strategy", "error", text)
    for one, other in (("process_group", "device_mesh"), ("ignored_modules", "ignored_states")):
        if document.get(one) is not None and document.get(other) is not None:
            yield Finding(one, "error", f"FSDP raises when both {one} and {other} are given: keep {other}.")
    if document.get("auto_wrap_policy") is None:
        text = "without it the whole model is one unit: all weights are gathered at once, and nothing overlaps."
        yield Finding("auto_wrap_policy", "warning", text)
    if "backward_prefetch" in document and document["backward_prefetch"] is None:
        yield Finding("backward_prefetch", "warning", "none: gathers do not overlap with backward; say BACKWARD_PRE.")
