"""Lightning's callbacks, of which ModelCheckpoint says when training state is saved, where, and how much of it is kept.

It keeps the last checkpoint or all of them, or the best few by a metric. By its own metric `step`, of which more is
better, those are the last few. One that saves every so many steps saves no other: the end of a run, where the interval
does not divide it, needs a second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.keys import ANY, BOOLEAN, MISSING, TEXT, Type, choice, integer
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.lightning.keys import WATCHERS
from terrazzo.dialects.formats.lightning.trainer_arguments import TrainerArguments
from terrazzo.messages import did_you_mean

__all__ = ["read_callbacks", "steps_left_out", "write_saving"]

_CLASS = "lightning.pytorch.callbacks.ModelCheckpoint"
_EVERY = "every_n_train_steps"
_TRIGGERS = (_EVERY, "every_n_epochs", "train_time_interval")
_BY_STEP = {"monitor": "step", "mode": "max"}
_ARGUMENTS: dict[str, Type] = {
    _EVERY: integer(),
    "every_n_epochs": integer(),
    "save_top_k": integer(-1),
    "mode": choice({"min": "min", "max": "max"}, fold=False),
    "save_last": choice({True: True, False: False, "link": "link"}),
    **dict.fromkeys(("dirpath", "filename", "monitor"), TEXT),
    **dict.fromkeys(("save_weights_only", "save_on_exception", "save_on_train_epoch_end"), BOOLEAN),
    **dict.fromkeys(("verbose", "enable_version_counter", "auto_insert_metric_name"), BOOLEAN),
    "train_time_interval": ANY,
}
"""What ModelCheckpoint takes."""
_NOT_STEPS = "ModelCheckpoint saves at ends of epochs, or by the clock, where it has no every_n_train_steps: say that"


# -- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModelCheckpoint:
    """One ModelCheckpoint's arguments, checked.

    Attributes:
        values: by name, without those that are null.
        fault: why Lightning raises on them; empty where it takes them, and only then `values` is all of them.
    """

    values: Mapping[str, Any]
    fault: str = ""

    @property
    def every(self) -> int:
        """Steps between checkpoints; 0: it saves at no steps."""
        return int(self.values.get(_EVERY, 0))

    @property
    def top(self) -> int:
        """How many are kept; -1: all."""
        return int(self.values.get("save_top_k", 1))

    @property
    def last(self) -> bool:
        """Whether the last is kept, too, whatever else is: at each time, or at the end where there was none."""
        return bool(self.values.get("save_last"))


def _model_checkpoints(listed: Any) -> list[_ModelCheckpoint]:
    """Every ModelCheckpoint among `callbacks`."""
    savers = [each for each in _each(listed) if _name(each) == "ModelCheckpoint"]
    return [_checked(each.get("init_args") if isinstance(each, Mapping) else None) for each in savers]


def _checked(arguments: Any) -> _ModelCheckpoint:
    if arguments is not None and not isinstance(arguments, Mapping):
        return _ModelCheckpoint({}, f"init_args of ModelCheckpoint is {found(arguments)}, expected its arguments")
    values: dict[str, Any] = {}
    for name, raw in (arguments or {}).items():
        if name not in _ARGUMENTS:
            near = did_you_mean(name, _ARGUMENTS)
            return _ModelCheckpoint({}, f"ModelCheckpoint has no argument {name} and raises a TypeError.{near}")
        if raw is not None and (value := _ARGUMENTS[name].parse(raw)) is MISSING:
            return _ModelCheckpoint({}, f"{name} is {found(raw)}, expected {_ARGUMENTS[name].expected}")
        if raw is not None:
            values[name] = value
    saver = _ModelCheckpoint(values)
    return replace(saver, fault=_fault(saver))


def _fault(saver: _ModelCheckpoint) -> str:
    """Why Lightning raises on arguments together; empty where it takes them."""
    if len(triggers := [name for name in _TRIGGERS if saver.values.get(name)]) > 1:
        return f"ModelCheckpoint raises on {' beside '.join(triggers)}: say one"
    if "monitor" not in saver.values and saver.top not in (-1, 0, 1):
        by = "say by which, as in monitor: step, mode: max, which are the last"
        return f"ModelCheckpoint raises on save_top_k {saver.top} without monitor: {by}"
    return ""


def _each(listed: Any) -> list[Any]:
    return listed if isinstance(listed, list) else [listed]


def _name(callback: Any) -> str:
    path = callback.get("class_path") if isinstance(callback, Mapping) else callback
    return str(path).rpartition(".")[2]


def read_callbacks(reader: Reader, trainer: TrainerArguments) -> SettingsByPath:
    """When is saved, by the switch and ModelCheckpoint; a verdict on all callbacks, which are one key."""
    switch, key = f"{trainer.prefix}enable_checkpointing", f"{trainer.prefix}callbacks"
    listed = reader.raw(key)
    savers = _model_checkpoints(listed)
    settings: SettingsByPath = {}
    names = {_name(each) for each in _each(listed)}
    losses = [] if names <= WATCHERS or listed is None else [reader.keys[key].why]
    if reader.keys[switch].type.parse(reader.raw(switch)) is False:
        settings["saving.when"] = replace(reader.take(switch), value="never")
        if savers:
            reader.refuse(key, "Lightning raises on ModelCheckpoint beside enable_checkpointing: false: drop one")
    elif faults := [saver.fault for saver in savers if saver.fault]:
        reader.refuse(key, faults[0])
    elif savers:
        settings, lost = _saving(key, savers, trainer.max_steps)
        losses += lost
    if listed is not None:
        reader.keep(key, "; ".join(losses) or "they watch the run", loss="lossy" if losses else "harmless")
    return settings


def _saving(key: str, savers: list[_ModelCheckpoint], total: int | None) -> tuple[SettingsByPath, list[str]]:
    """What all ModelCheckpoints say, and what is lost of it: one, or one beside another that saves the run's end."""
    if len(savers) > 1:
        others = [each for each in savers if total is None or each.every != total]
        at_end = [each for each in savers if each not in others and not each.values.get("save_weights_only")]
        folders = {each.values.get("dirpath") for each in savers}
        if (len(others), len(at_end), len(folders)) != (1, 1, 1):
            return {}, ["several ModelCheckpoints save by rules of their own: keep one"]
        savers = others
    return _saving_by(key, savers[0], total)


def _saving_by(key: str, saver: _ModelCheckpoint, total: int | None) -> tuple[SettingsByPath, list[str]]:
    values, top, by = saver.values, saver.top, saver.values.get("monitor")
    triggers = [values[name] for name in _TRIGGERS if name in values]  # with none, ends of epochs
    timeless = (bool(triggers) and not any(triggers)) or (total is not None and saver.every > total)
    if (top == 0 or timeless) and not saver.last:
        return {"saving.when": Setting("never", "file", key)}, []
    settings: SettingsByPath = {}
    lost: list[str] = []
    if timeless or (top == 0 and not saver.every):
        settings = {"saving.when": Setting("end", "file", key)}
    elif saver.every:
        settings = {"saving.when": Setting("steps", "file", key), "saving.every": Setting(saver.every, "file", key)}
    else:
        lost.append(_NOT_STEPS)
    best = by is not None and {"monitor": by, "mode": values.get("mode")} != _BY_STEP
    if top != -1 and saver.last and (best or top == 0 or timeless):
        settings["saving.keep_last"] = Setting(1, "file", key)
        lost += [f"it keeps the best {top} by {by} as well"] if best and top and not timeless else []
    elif top == -1 or not best:
        settings["saving.keep_last"] = Setting(None if top == -1 else top, "file", key)
    else:
        lost.append(f"it keeps the best {top} by {by}, and not the last")
    if values.get("save_weights_only"):
        lost.append("it saves weights alone, from which nothing resumes")
    if "dirpath" in values:
        settings["saving.folder"] = Setting(values["dirpath"], "file", key)
    return settings, lost


def steps_left_out(listed: Any, total: int | None) -> str:
    """Which steps of a run no checkpoint has, behind the last that one is saved at; empty where there are none.

    Args:
        listed: the `callbacks`.
        total: the run's length.
    """
    savers = _model_checkpoints(listed)
    intervals = [saver.every for saver in savers]
    if total is None or not intervals or 0 in intervals or not (left := min(total % each for each in intervals)):
        return ""
    if left == total and any(saver.last for saver in savers):  # which is then that of the end
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
