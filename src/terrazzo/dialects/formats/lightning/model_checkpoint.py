"""Lightning's callbacks, of which ModelCheckpoint says when training state is saved, where, and how much of it is kept.

It keeps the last checkpoint or all of them, or the best few by a metric. By its own metric `step`, of which more is
better, those are the last few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.keys import MISSING, integer
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.formats.lightning.keys import WATCHERS

__all__ = ["read_callbacks", "write_saving"]

_CLASS = "lightning.pytorch.callbacks.ModelCheckpoint"
_BY_STEP = {"monitor": "step", "mode": "max"}
_NUMBERS = {"every_n_train_steps": integer(), "save_top_k": integer(-1)}
_NOT_STEPS = "ModelCheckpoint saves at ends of epochs, or by the clock, where it has no every_n_train_steps: say that"


def read_callbacks(reader: Reader, prefix: str) -> SettingsByPath:
    """When is saved, by the switch and the one ModelCheckpoint; a verdict on all callbacks, which are one key."""
    switch, key = f"{prefix}enable_checkpointing", f"{prefix}callbacks"
    listed = reader.raw(key)
    callbacks = [
        each if isinstance(each, Mapping) else {"class_path": each}
        for each in (listed if isinstance(listed, list) else [listed])
    ]
    names = [str(each.get("class_path")).rpartition(".")[2] for each in callbacks]
    savers = [each for each, name in zip(callbacks, names, strict=True) if name == "ModelCheckpoint"]
    settings: SettingsByPath = {}
    losses = [] if set(names) <= WATCHERS or listed is None else [reader.keys[key].why]
    if reader.keys[switch].type.parse(reader.raw(switch)) is False:
        settings["saving.when"] = replace(reader.take(switch), value="never")
        if savers:
            reader.refuse(key, "Lightning raises on ModelCheckpoint beside enable_checkpointing: false: drop one")
    elif len(savers) > 1:
        losses.append("several ModelCheckpoints save by rules of their own: keep one")
    elif savers:
        settings, lost = _saver(reader, key, savers[0].get("init_args") or {})
        losses += lost
    if listed is not None:
        reader.keep(key, "; ".join(losses) or "they watch the run", loss="lossy" if losses else "harmless")
    return settings


def _saver(reader: Reader, key: str, arguments: Mapping[str, Any]) -> tuple[SettingsByPath, list[str]]:
    """What one ModelCheckpoint says, and what is lost of it."""
    numbers = {name: kind.parse(arguments[name]) for name, kind in _NUMBERS.items() if arguments.get(name) is not None}
    for name in [name for name, number in numbers.items() if number is MISSING]:
        reader.refuse(key, f"{name} is {arguments[name]!r}, expected {_NUMBERS[name].expected}")
        return {}, []
    top, by = numbers.get("save_top_k", 1), arguments.get("monitor")
    if top == 0:
        return {"saving.when": Setting("never", "file", key)}, []
    settings, lost = {}, []
    if every := numbers.get("every_n_train_steps"):
        settings = {"saving.when": Setting("steps", "file", key), "saving.every": Setting(every, "file", key)}
    else:
        lost.append(_NOT_STEPS)
    if top == -1 or by is None or {"monitor": by, "mode": arguments.get("mode")} == _BY_STEP:
        settings["saving.keep_last"] = Setting(None if top == -1 else top, "file", key)
    else:
        lost.append(f"it keeps the best {top} by {by}, and not the last")
    if arguments.get("save_weights_only"):
        lost.append("it saves weights alone, from which nothing resumes")
    if arguments.get("dirpath") is not None:
        settings["saving.folder"] = Setting(str(arguments["dirpath"]), "file", key)
    return settings, lost


def write_saving(draft: Draft) -> None:
    """Write a ModelCheckpoint that saves every so many steps; of those of the run, at its end."""
    when, keep = draft.value("saving.when"), draft.value("saving.keep_last")
    every = draft.value({"steps": "saving.every", "end": "schedule.total_steps"}.get(when, "saving.every"))
    paths = ("saving.when", "saving.every", "saving.keep_last")
    if when == "never":
        draft.put(paths, "trainer.enable_checkpointing", False)
    elif when is None or every is None:
        edit = "set schedule.total_steps" if when == "end" else "say it to the ModelCheckpoint callback"
        draft.lossy([path for path in paths if draft.value(path) is not None], edit)
    if when not in ("steps", "end") or every is None:
        draft.option("saving.folder", "trainer.default_root_dir")
        return
    arguments = {"every_n_train_steps": every, "save_top_k": keep or -1, **(_BY_STEP if (keep or 0) > 1 else {})}
    if draft.value("saving.folder") is not None:
        arguments["dirpath"] = draft.value("saving.folder")
    draft.write(key := "trainer.callbacks", [{"class_path": _CLASS, "init_args": arguments}])
    draft.implied((*paths, "saving.folder"), key=key)
