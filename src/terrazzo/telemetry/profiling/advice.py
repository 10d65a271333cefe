"""What to change in a profiled script, in terms of what it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.telemetry.verdict.bounds import BOUNDS
from terrazzo.telemetry.verdict.edits import Advice

__all__ = ["advice_for"]


def advice_for(cause: str, facts: Mapping[str, Any]) -> Advice:
    """An edit of the script: a line of code, or a sentence.

    Args:
        cause: what bounds its step, as `Verdict.bound`.
        facts: what the script was seen to use, as the probe has written.
    """
    if cause == "input":
        return _reading(facts)
    if cause == "gather":
        return _code("fully_shard(..., reshard_after_forward=False)") if facts.get("fsdp") else _words(_LARGER)
    if cause == "reduce":
        inner = "model.set_requires_gradient_sync(False)" if facts.get("fsdp") else "`with model.no_sync():`"
        return _words(f"{inner} for all but the last backward of several in a step, or larger batches,")
    if cause in ("compute", "device", "host"):
        return _computing(cause, facts)
    return _words(BOUNDS[cause].script_edit or "A look at what the script does there")


_LARGER = "Larger batches on each rank"


def _code(text: str) -> Advice:
    return Advice(text, is_code=True)


def _words(subject: str) -> Advice:
    return Advice(f"{subject} would help", is_code=False)


def _reading(facts: Mapping[str, Any]) -> Advice:
    workers = facts.get("workers")
    if workers is None:
        return _words("A DataLoader with workers")
    if workers == 0:
        return _code("DataLoader(..., num_workers=2, persistent_workers=True)")
    cores = facts.get("cores", 2 * workers)
    if workers >= cores:
        return _words(
            f"Less work on each sample, as the DataLoader's {workers} workers have all {cores} cores of a rank,"
        )
    more = min(2 * workers, cores)
    persistent = "" if facts.get("persistent", True) else ", persistent_workers=True"
    return _code(f"DataLoader(..., num_workers={more}{persistent})")


def _computing(cause: str, facts: Mapping[str, Any]) -> Advice:
    if cause == "compute":  # on a CPU, where it was not measured that compiling or bf16 would help
        return _words(BOUNDS[cause].script_edit)
    fused = [] if facts.get("compiles") else ["model = torch.compile(model)"]
    if cause == "host":
        more = ["larger batches"]
    else:
        more = [] if facts.get("autocasts") else ["torch.autocast to bfloat16"]
    text = " or ".join([*fused, *more]) or BOUNDS[cause].script_edit
    return _code(text) if fused else _words(text)
