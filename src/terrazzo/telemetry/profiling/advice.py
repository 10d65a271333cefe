"""What to change in a script of somebody else's, in words of what it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.telemetry.display.bounds import BOUNDS

__all__ = ["advice_for"]


def advice_for(cause: str, facts: Mapping[str, Any]) -> str:
    """An edit of the script, as the `edit` of a `Verdict`: with "=", or a sentence.

    Args:
        cause: that bounds its step, as in a `Verdict`.
        facts: what the script was seen to use, as the probe writes them down.
    """
    advice = _advice(cause, facts)
    return advice if "=" in advice else f"{advice} would help"


def _advice(cause: str, facts: Mapping[str, Any]) -> str:
    if cause == "input":
        return _reading(facts)
    if cause == "gather":
        return "fully_shard(..., reshard_after_forward=False)" if facts.get("fsdp") else "Larger batches on each rank"
    if cause == "reduce":
        inner = "model.set_requires_gradient_sync(False)" if facts.get("fsdp") else "`with model.no_sync():`"
        return f"{inner} for all but the last backward of several in a step, or larger batches,"
    if cause in ("compute", "device", "host"):
        return _computing(cause, facts)
    return BOUNDS[cause].script_edit or "A look at what the script does there"


def _reading(facts: Mapping[str, Any]) -> str:
    workers = facts.get("workers")
    if workers is None:
        return "A DataLoader with workers"
    if workers == 0:
        return "DataLoader(..., num_workers=2, persistent_workers=True)"
    cores = facts.get("cores", 2 * workers)
    if workers >= cores:
        return f"Less work on each sample, as the DataLoader's {workers} workers have all {cores} cores of a rank,"
    more = min(2 * workers, cores)
    persistent = "" if facts.get("persistent", True) else ", persistent_workers=True"
    return f"DataLoader(..., num_workers={more}{persistent})"


def _computing(cause: str, facts: Mapping[str, Any]) -> str:
    wide = [] if facts.get("autocasts") else ["torch.autocast to bfloat16"]
    fused = [] if facts.get("compiles") else ["model = torch.compile(model)"]
    if cause == "host":
        return " or ".join([*fused, "larger batches"])
    return " or ".join([*fused, *wide]) or BOUNDS[cause].script_edit
