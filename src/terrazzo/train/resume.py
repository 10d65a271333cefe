"""What a resumed run takes from its checkpoint, whatever its configuration says."""

from __future__ import annotations

from typing import Any

from terrazzo.config import Config, flatten, without_passwords

__all__ = ["resume_notes"]

COMPARED = ("optimizer", "schedule", "precision", "model", "lora", "data", "batch")
PLACES = ("data.cache", "model.path", "model.weights")  # where things are, and how they were before the first step


def resume_notes(config: Config, saved: dict[str, Any]) -> list[str]:
    """One line for each setting of training that differs from `saved`, the checkpoint's, saying which one is used."""
    now = flatten(without_passwords(config.model_dump(mode="json")))  # as it was saved
    before = flatten(saved)
    keys = [key for key in sorted(now.keys() | before.keys()) if key.split(".")[0] in COMPARED and key not in PLACES]
    return [_note(key, now.get(key), before.get(key)) for key in keys if now.get(key) != before.get(key)]


def _note(key: str, now: str | None, before: str | None) -> str:
    # The optimizer's hyper-parameters are restored with its state; which parameters decay is decided at the start.
    restored = key.startswith("optimizer.") and not key.startswith("optimizer.no_decay")
    here, there = ("", ", which is used") if restored else (", which is used,", "")
    now, before = now or "not set", before or "not set"
    return f"resume: {key} is {now} in the configuration{here} and {before} in the checkpoint{there}"
