"""What a run goes on from, and what it takes from there, whatever its configuration says."""

from __future__ import annotations

from typing import Any

from terrazzo.checkpoint import clear, latest
from terrazzo.config import Config, flatten, without_passwords
from terrazzo.errors import BadInput

__all__ = ["clear_checkpoints", "is_restored", "resume_from", "resume_notes"]

COMPARED = ("optimizer", "schedule", "precision", "model", "lora", "data", "objective", "batch")
PLACES = ("data.cache", "model.path", "model.weights")  # where things are, and how they were before the first step


def resume_from(config: Config) -> str | None:
    """The checkpoint to continue from, or None for a new run; raises `BadInput` as `checkpoint.resume` demands."""
    folder = config.checkpoint_folder
    newest = latest(folder)
    if config.checkpoint.resume == "required" and newest is None:
        raise BadInput(
            f"checkpoint.resume is 'required', but '{folder}' holds no complete checkpoint: correct"
            " checkpoint.folder, or use checkpoint.resume=if_exists to start anew."
        )
    if config.checkpoint.resume == "never":
        if newest is not None and not config.checkpoint.overwrite:
            raise BadInput(
                f"checkpoint.resume is 'never', but there is '{newest}' of another run, which is not"
                " overwritten: use another checkpoint.folder, checkpoint.resume=if_exists to continue it, or"
                " checkpoint.overwrite=true to remove it."
            )
        return None
    return newest


def clear_checkpoints(config: Config) -> None:
    """Remove what `checkpoint.overwrite` allows to remove. Called by one rank, just before training starts."""
    if config.checkpoint.resume == "never" and config.checkpoint.overwrite:
        clear(config.checkpoint_folder)


def resume_notes(config: Config, saved: dict[str, Any]) -> list[str]:
    """One line for each setting of training that differs from `saved`, the checkpoint's, saying which one is used."""
    now = flatten(without_passwords(config.model_dump(mode="json")))  # as it was saved
    before = flatten(Config()) | flatten(saved)  # a key that was not there yet had its default's meaning
    keys = [key for key in sorted(now.keys() | before.keys()) if key.split(".")[0] in COMPARED and key not in PLACES]
    return [_note(key, now.get(key), before.get(key)) for key in keys if now.get(key) != before.get(key)]


def is_restored(key: str) -> bool:
    """The optimizer's hyper-parameters come with its state; which parameters decay is decided at the start."""
    return key.startswith("optimizer.") and not key.startswith("optimizer.no_decay")


def _note(key: str, now: str | None, before: str | None) -> str:
    here, there = ("", ", which is used") if is_restored(key) else (", which is used,", "")
    now, before = now or "not set", before or "not set"
    return f"resume: {key} is {now} in the configuration{here} and {before} in the checkpoint{there}"
