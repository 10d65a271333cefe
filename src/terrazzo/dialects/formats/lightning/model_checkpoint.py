"""Lightning's callbacks, of which ModelCheckpoint says when training state is saved, where, and how much of it is kept.

It keeps the last checkpoint or all of them, or the best few by a metric. By its own metric `step`, of which more is
better, those are the last few. One that saves every so many steps saves no other: the end of a run, where the interval
does not divide it, needs a second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.keys import ANY, BOOLEAN, MISSING, Type, choice, integer
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.lightning.keys import WATCHERS
from terrazzo.messages import did_you_mean

__all__ = ["read_callbacks", "steps_left_out", "write_saving"]

_CLASS = "lightning.pytorch.callbacks.ModelCheckpoint"
_EVERY = "every_n_train_steps"
_TRIGGERS = (_EVERY, "every_n_epochs", "train_time_interval")
_BY_STEP = {"monitor": "step", "mode": "max"}
_OTHERS = ("dirpath", "filename", "monitor", "save_last", "auto_insert_metric_name", "train_time_interval")
_ARGUMENTS: dict[str, Type] = {
    _EVERY: integer(),
    "every_n_epochs": integer(),
    "save_top_k": integer(-1),
    "mode": choice({"min": "min", "max": "max"}, fold=False),
    **dict.fromkeys(("save_weights_only", "save_on_exception", "save_on_train_epoch_end"), BOOLEAN),
    **dict.fromkeys(("verbose", "enable_version_counter"), BOOLEAN),
    **dict.fromkeys(_OTHERS, ANY),
}
"""What ModelCheckpoint takes."""
_NOT_STEPS = "ModelCheckpoint saves at ends of epochs, or by the clock, where it has no every_n_train_steps: say that"


# -- reading -------------------------------------------------------------------------------------------------------


def read_callbacks(reader: Reader, prefix: str) -> SettingsByPath:
    """When is saved, by the switch and ModelCheckpoint; a verdict on all callbacks, which are one key."""
    switch, key = f"{prefix}enable_checkpointing", f"{prefix}callbacks"
    listed = reader.raw(key)
    savers = _arguments_of_savers(listed)
    settings: SettingsByPath = {}
    names = {_name(each) for each in _each(listed)}
    losses = [] if names <= WATCHERS or listed is None else [reader.keys[key].why]
    if reader.keys[switch].type.parse(reader.raw(switch)) is False:
        settings["saving.when"] = replace(reader.take(switch), value="never")
        if savers:
            reader.refuse(key, "Lightning raises on ModelCheckpoint beside enable_checkpointing: false: drop one")
    elif faults := [fault for saver in savers if (fault := _fault(saver))]:
        reader.refuse(key, faults[0])
    elif savers:
        settings, lost = _savers(key, savers, _last_step(reader.raw(f"{prefix}max_steps")))
        losses += lost
    if listed is not None:
        reader.keep(key, "; ".join(losses) or "they watch the run", loss="lossy" if losses else "harmless")
    return settings


def _each(listed: Any) -> list[Any]:
    return listed if isinstance(listed, list) else [listed]


def _name(callback: Any) -> str:
    path = callback.get("class_path") if isinstance(callback, Mapping) else callback
    return str(path).rpartition(".")[2]


def _arguments_of_savers(listed: Any) -> list[Mapping[str, Any]]:
    """The arguments of every ModelCheckpoint among `callbacks`."""
    savers = [each for each in _each(listed) if _name(each) == "ModelCheckpoint"]
    return [(each.get("init_args") or {}) if isinstance(each, Mapping) else {} for each in savers]


def _last_step(raw: Any) -> int | None:
    """The step that `max_steps` ends a run at; None where that is not what ends it."""
    steps = integer(1).parse(raw)
    return None if steps is MISSING else steps


def _fault(arguments: Mapping[str, Any]) -> str:
    """Why Lightning raises on a ModelCheckpoint; empty where it takes it."""
    for name, value in arguments.items():
        if name not in _ARGUMENTS:
            return f"ModelCheckpoint has no argument {name} and raises a TypeError.{did_you_mean(name, _ARGUMENTS)}"
        if value is not None and _ARGUMENTS[name].parse(value) is MISSING:
            return f"{name} is {found(value)}, expected {_ARGUMENTS[name].expected}"
    if len(triggers := [name for name in _TRIGGERS if arguments.get(name)]) > 1:
        return f"ModelCheckpoint raises on {' beside '.join(triggers)}: say one"
    if arguments.get("monitor") is None and _top(arguments) not in (-1, 0, 1):
        by = "say by which, as in monitor: step, mode: max, which are the last"
        return f"ModelCheckpoint raises on save_top_k {_top(arguments)} without monitor: {by}"
    return ""


def _top(arguments: Mapping[str, Any]) -> int:
    top: int = integer(-1).parse(1 if (raw := arguments.get("save_top_k")) is None else raw)
    return top


def _savers(key: str, savers: list[Mapping[str, Any]], total: int | None) -> tuple[SettingsByPath, list[str]]:
    """What all ModelCheckpoints say, and what is lost of it: one, or one beside another that saves the run's end."""
    if len(savers) > 1:
        others = [each for each in savers if total is None or each.get(_EVERY) != total]
        at_end = [each for each in savers if each not in others and not each.get("save_weights_only")]
        if (len(others), len(at_end)) != (1, 1) or others[0].get("dirpath") != at_end[0].get("dirpath"):
            return {}, ["several ModelCheckpoints save by rules of their own: keep one"]
        savers = others
    return _saver(key, savers[0], total)


def _saver(key: str, arguments: Mapping[str, Any], total: int | None) -> tuple[SettingsByPath, list[str]]:
    every, top, by = integer().parse(arguments.get(_EVERY) or 0), _top(arguments), arguments.get("monitor")
    triggers = [arguments[name] for name in _TRIGGERS if arguments.get(name) is not None]  # with none, ends of epochs
    off = bool(triggers) and not any(triggers)
    if top == 0 or off or (total is not None and every > total):
        return {"saving.when": Setting("never", "file", key)}, []
    settings, lost = {}, []
    if every:
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


def steps_left_out(trainer: Mapping[str, Any]) -> str:
    """Which steps of a run no checkpoint has, behind the last that one is saved at; empty where there are none."""
    total = _last_step(trainer.get("max_steps"))
    intervals = [integer(1).parse(each.get(_EVERY)) for each in _arguments_of_savers(trainer.get("callbacks"))]
    if total is None or not intervals or MISSING in intervals or not (left := min(total % each for each in intervals)):
        return ""
    edit = f"add a second ModelCheckpoint, with {_EVERY}: {total}"
    if left == total:
        return f"nothing is saved: {_EVERY} is more than max_steps, {total}"
    return f"the last {left} of {total} steps are not saved, only multiples of {_EVERY} are: {edit}"


# -- writing -------------------------------------------------------------------------------------------------------


def write_saving(draft: Draft) -> None:
    """Write a ModelCheckpoint that saves every so many steps, and one for the end of the run where that is another."""
    when, keep, total = (draft.value(path) for path in ("saving.when", "saving.keep_last", "schedule.total_steps"))
    every = draft.value("saving.every") if when != "end" else total
    paths = ("saving.when", "saving.every", "saving.keep_last")
    if when == "never":
        draft.put(paths, "trainer.enable_checkpointing", False)
    elif when is None or every is None:
        edit = "set schedule.total_steps" if when == "end" else "say it to the ModelCheckpoint callback"
        draft.lossy([path for path in paths if draft.value(path) is not None], edit)
    if when not in ("steps", "end") or every is None:
        draft.option("saving.folder", "trainer.default_root_dir")
        return
    folder = {} if draft.value("saving.folder") is None else {"dirpath": draft.value("saving.folder")}
    kept = {"save_top_k": keep or -1, **(_BY_STEP if (keep or 0) > 1 else {})}
    savers = [{_EVERY: every if total is None else min(every, total), **kept, **folder}]
    if total is not None and every < total and total % every:
        savers.append({_EVERY: total, "save_top_k": -1, **folder})
    draft.write(key := "trainer.callbacks", [{"class_path": _CLASS, "init_args": each} for each in savers])
    draft.implied((*paths, "saving.folder"), key=key)
    if len(savers) > 1 and keep:
        draft.implied("saving.keep_last", "and the one at the end of the run beside them", key)
    if total is None:
        edit = "at the end of a run none is saved there: set schedule.total_steps"
        draft.lossy("saving.when", f"ModelCheckpoint saves at multiples of {_EVERY} alone, and {edit}", key)
