"""Which checkpoint a run continues from, and what is said where its configuration differs from that."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from terrazzo.checkpoint import clear, latest, open_source, step_path, suspects
from terrazzo.config import Config, setting_texts, without_passwords
from terrazzo.errors import BadInput, Damaged, TerrazzoError
from terrazzo.messages import counted, listed
from terrazzo.shell_command import terrazzo_command
from terrazzo.train.checkpoints.local_folder import local_checkpoints
from terrazzo.train.data.source_file import SourceFile

__all__ = [
    "clear_checkpoints",
    "data_changes",
    "is_restored",
    "resume_from",
    "resume_notes",
    "saying_what_differs",
    "seeded_anew",
    "stamps",
    "suspect_notes",
]

COMPARED = ("optimizer", "schedule", "precision", "model", "lora", "data", "objective", "batch")
BUILT = {
    *("model.kind", "model.vocab_size", "model.dim", "model.layers", "model.heads", "model.kv_heads", "model.ffn_dim"),
    *("model.tie_embeddings", "model.experts.count", "model.experts.ffn_dim", "model.experts.shared"),
    *("model.experts.balance", "lora.rank", "lora.target_modules", "lora.bias", "objective.name", "data.tokenizer"),
    *("optimizer.name", "optimizer.muon.matrices", "optimizer.muon.others"),
}
"""The settings that decide which tensors a run has, and which states its optimizer keeps for them."""
PLACES = ("data.cache", "model.path", "model.weights")  # where things are, and how they were before the first step
_MOST_FILES = 256
_NOT_TRAINED_ON = ("data.cache", "data.validation_source")


def resume_from(config: Config, local: Collection[str] | None = None) -> str | None:
    """The checkpoint to continue from, or None for a new run; raises `BadInput` as `checkpoint.resume` demands.

    Args:
        local: local checkpoints that are newer than the durable ones, oldest first; default: those on this host.
    """
    folder = config.checkpoint_folder
    newest = latest(folder)
    newest = [newest, *(local_checkpoints(config, newest) if local is None else local)][-1]
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


def suspect_notes(config: Config) -> list[str]:
    """A line about checkpoints that were put aside as suspect, and are not resumed from. Called by the first rank."""
    if config.checkpoint.resume == "never" or not (names := suspects(config.checkpoint_folder)):
        return []
    why = "saved when a rank computed wrongly, or held other copies"
    return [f"resume: {listed(names)} in {config.checkpoint_folder}, {why}: SUSPECT, not used"]


def clear_checkpoints(config: Config) -> list[str]:
    """Remove what `checkpoint.overwrite` allows to, just before training; returns a line about it. For one rank."""
    anew = config.checkpoint.resume == "never" and config.checkpoint.overwrite
    if not (anew and (removed := clear(config.checkpoint_folder))):
        return []
    return [f"anew: removed {listed(removed)} of an earlier run in {config.checkpoint_folder} (checkpoint.overwrite)"]


@contextmanager
def saying_what_differs(config: Config, folder: str) -> Iterator[None]:
    """Adds to the error of a checkpoint in `folder` that does not fit: which settings differ, and what to do."""
    try:
        yield
    except Damaged:
        raise
    except BadInput as error:
        changed = _rebuilt(config, folder)
        if not changed:
            raise
        where = "log.folder" if config.checkpoint.folder is None else "checkpoint.folder"
        raise BadInput(
            f"{error} This run differs from the checkpoint's in {listed(changed, 8)}. To go on, put that back; to start"
            f" anew, take another {where}, or checkpoint.resume=never checkpoint.overwrite=true, which removes the"
            " checkpoints that are there."
        ) from None


def _rebuilt(config: Config, folder: str) -> list[str]:
    """`model.dim (256 → 128)` for each setting of `BUILT` that differs from the newest checkpoint's."""
    try:
        newest = latest(folder)
        saved = {} if newest is None else open_source(newest).extra.get("config", {})
    except TerrazzoError:
        return []
    if not isinstance(saved, dict) or not saved:
        return []
    changed = _differing(config, saved)
    return [f"{key} ({before} → {now})" for key, now, before in changed if key in BUILT]


def resume_notes(config: Config, saved: dict[str, Any]) -> list[str]:
    """One line for each setting of training that differs from `saved`, the checkpoint's, saying which one is used."""
    return [_note(*each) for each in _differing(config, saved)]


def _differing(config: Config, saved: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Settings of training that differ, each as its key, the value here and the value in the checkpoint."""
    now = _settings_of(without_passwords(config.model_dump(mode="json")))  # as it was saved
    before = _settings_of(Config()) | _settings_of(saved)  # a key that was not there yet had its default's meaning
    keys = [key for key in sorted(now.keys() | before.keys()) if key.split(".")[0] in COMPARED and key not in PLACES]
    both = [(key, now.get(key) or "not set", before.get(key) or "not set") for key in keys]
    return [(key, here, there) for key, here, there in both if here != there]


def seeded_anew(saved: tuple[int, int], here: tuple[int, int]) -> str:
    """The note that random generators are seeded anew. Both arguments are (ranks, `plan.mesh.tp`)."""
    before, now = (f" with plan.mesh.tp {tp}" if saved[1] != here[1] else "" for _, tp in (saved, here))
    return f"resume: saved by {counted(saved[0], 'rank')}{before}: random generators are seeded anew for {here[0]}{now}"


def is_restored(key: str) -> bool:
    """Whether a setting is restored with the optimizer's state; which parameters it applies to is decided at start."""
    at_start = ("optimizer.decay", "optimizer.no_decay", "optimizer.muon.matrices", "optimizer.muon.others")
    return key.startswith("optimizer.") and not key.startswith(at_start)


def stamps(files: Sequence[SourceFile]) -> list[list[Any]] | None:
    """Name, size and time of each file, so that a resumed run can say which has changed; None for too many files."""
    return [[file.name, file.size_bytes, file.stamp] for file in files] if len(files) <= _MOST_FILES else None


def data_changes(config: Config, saved: dict[str, Any], files: Sequence[SourceFile]) -> str:
    """What may have changed the training data since a checkpoint with the extra `saved`, and what to do.

    The loader says whether they have changed.
    """
    changes = _changed_settings(config, saved["config"]) or _changed_files(files, saved.get("files"))
    what = f"What has changed: {changes}. Put it back" if changes else "Put the data back as they were"
    return str(
        without_passwords(f"{what}, or start a new run from the weights: {_from_weights(config, saved['step'])}.")
    )


def _settings_of(config: Config | dict[str, Any]) -> dict[str, str]:
    """Settings as text by key, without empty mappings: those that are not empty have keys of their own."""
    return {key: value for key, value in setting_texts(config).items() if value != "{}"}


def _changed_settings(config: Config, saved: dict[str, Any]) -> str:
    now = setting_texts(without_passwords(config.model_dump(mode="json")))  # as it was saved
    before = setting_texts(Config()) | setting_texts(saved)
    keys = [key for key in now if key.startswith("data.") and key not in _NOT_TRAINED_ON]
    keys += ["batch.sequence_length", "train.seed"]
    changed = [key for key in keys if now[key] != before.get(key)]
    return listed([f"{key} is {now[key]} and was {before.get(key, 'not set')}" for key in changed])


def _changed_files(files: Sequence[SourceFile], saved: list[list[Any]] | None) -> str:
    """Files that differ by name or size; if none does, those that differ by time."""
    now = stamps(files)
    if now is None or saved is None:
        return ""
    before, here = {name: rest for name, *rest in saved}, {name: rest for name, *rest in now}
    changes = [f"'{name}' is gone" for name in before if name not in here]
    changes += [f"'{name}' is new" for name in here if name not in before]
    both = [name for name in here if name in before]
    changes += [
        f"'{name}' has {here[name][0]:,} bytes and had {before[name][0]:,}"
        for name in both
        if here[name][0] != before[name][0] and None not in (here[name][0], before[name][0])
    ]
    changes = changes or [f"'{name}' was written anew" for name in both if here[name] != before[name]]
    return f"in data.source, {listed(changes)}" if changes else ""


def _from_weights(config: Config, step: int) -> str:
    """The commands that start a new run from a checkpoint's weights."""
    if config.lora.rank is not None or config.objective.kind.scored:
        return "in another log.folder, of a model.path with them"
    newest, log = step_path(config.checkpoint_folder, step), config.log.folder
    weights, folders = f"{log}-weights", [f"log.folder={log}-new"]
    if config.checkpoint.folder is not None:
        folders.append(f"checkpoint.folder={config.checkpoint_folder}-new")
    convert = f"{terrazzo_command()} checkpoint convert {shlex.join([newest, weights])} --to hf"
    settings = ["model.kind=huggingface", f"model.path={weights}", "model.weights=pretrained", *folders]
    return f"{convert}, then the same command with {shlex.join(settings)}"


def _note(key: str, now: str, before: str) -> str:
    here, there = ("", ", which is used") if is_restored(key) else (", which is used,", "")
    return f"resume: {key} is {now} in the configuration{here} and {before} in the checkpoint{there}"
