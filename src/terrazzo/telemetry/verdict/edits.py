"""The one edit that would help most against what bounds a step."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from terrazzo.telemetry.verdict.bounds import BOUNDS

__all__ = ["Admits", "Advice", "edit_for"]


class Advice(NamedTuple):
    """What would help.

    Attributes:
        text: a sentence without its full stop, or the text to write.
        is_code: whether the text is to be written as it is: a setting `section.key=value`, or a line of a script.
    """

    text: str
    is_code: bool

    @property
    def sentence(self) -> str:
        return f"{self.text} would help" if self.is_code else self.text


Admits = Callable[[str], bool]
"""Tells whether the run's configuration would still be valid, and fit in memory, with this `section.key=value`."""

ConfigValues = Mapping[str, Any]


def edit_for(cause: str, axis: str, settings: ConfigValues | None, admits: Admits) -> Advice:
    """The first setting that helps and that `admits` allows; a sentence if there is none.

    Args:
        cause: a key of `BOUNDS`.
        axis: of the exchange, if the cause is one.
        settings: of the run, as in its `config.json`; None for a loop that has no configuration.
        admits: is asked about each setting, the best first.
    """
    candidates: list[str] = []
    if settings is not None:
        with contextlib.suppress(KeyError):  # another version's configuration, which has other settings
            candidates = _candidates(cause, axis, settings)
    for setting in candidates:
        if admits(setting):
            return Advice(setting, is_code=True)
    return Advice(BOUNDS[cause].edit.format(axis=axis), is_code=False)


def _candidates(cause: str, axis: str, settings: ConfigValues) -> list[str]:
    by_cause: dict[str, Callable[[ConfigValues], list[str]]] = {
        "compute": _computing,
        "device": _on_a_device,
        "host": _on_a_device,
        "gather": _gathering,
        "reduce": _reducing,
        "exchange": lambda all_: _shorter(all_, axis),
        "stages": lambda all_: [*_fuller(all_), *_shorter(all_, axis)],
        "tier": _nearer,
        "update": lambda all_: ["plan.name=zero1"] if all_["plan"]["name"] == "zero0" else [],
        "evaluate": lambda all_: _rarer(all_, "eval_every", "train"),
        "save": _saving,
        "local_save": lambda all_: _rarer(all_, "every", "checkpoint", "local"),
    }
    return by_cause[cause](settings) if cause in by_cause else []


def _computing(settings: ConfigValues) -> list[str]:
    more = settings["train"]["activation_checkpointing"] != "none"
    return ["train.activation_checkpointing=none"] if more else []


def _on_a_device(settings: ConfigValues) -> list[str]:
    """What compilation gains on a CPU was not measured: there it is not proposed."""
    return _computing(settings) + ([] if settings["train"]["compile"] else ["train.compile=true"])


def _gathering(settings: ConfigValues) -> list[str]:
    plan = settings["plan"]
    edits = ["plan.name=zero2"] if plan["name"] == "zero3" else []
    return [*edits, *_larger(settings), *(["plan.prefetch=2"] if plan["prefetch"] < 2 else [])]


def _reducing(settings: ConfigValues) -> list[str]:
    more = _larger(settings)
    return [*more, *(["plan.name=zero1"] if more and settings["plan"]["name"] in ("zero2", "zero3") else [])]


def _larger(settings: ConfigValues) -> list[str]:
    """Half as many micro-batches of twice the size; nothing if a rank has only one per step."""
    batch, mesh = settings["batch"], settings["plan"]["mesh"]
    size, whole = batch["micro_batch"], batch["global_batch"]
    shards = [mesh.get(name) for name in ("dp_replicate", "dp_shard")]
    ranks = math.prod(count for count in shards if isinstance(count, int))
    return [f"batch.micro_batch={2 * size}"] if whole >= 2 * size * ranks and whole % (2 * size) == 0 else []


def _shorter(settings: ConfigValues, axis: str) -> list[str]:
    ranks = settings["plan"]["mesh"].get(axis)
    return [f"plan.mesh.{axis}={ranks // 2}"] if isinstance(ranks, int) and ranks > 1 and ranks % 2 == 0 else []


def _fuller(settings: ConfigValues) -> list[str]:
    """A pipeline of more micro-batches, or of more and smaller stages."""
    size, pipeline = settings["batch"]["micro_batch"], settings["parallel"]["pipeline"]
    smaller = [f"batch.micro_batch={size // 2}"] if size % 2 == 0 else []
    is_plain = pipeline["schedule"] == "1f1b" and pipeline["chunks"] == 1
    return smaller + (["parallel.pipeline.chunks=2"] if is_plain else [])


def _nearer(settings: ConfigValues) -> list[str]:
    offload, name = settings["offload"], settings["plan"]["name"] or ""
    edits = [f"plan.name={name.partition('@')[0]}"] if "@" in name else []
    edits += [f"offload.{state}=device" for state in ("optim", "grad", "weight") if offload[state] not in _NEAR]
    return edits + (["offload.step=overlapped"] if offload["step"] == "synchronous" else [])


_NEAR = (None, "device")


def _saving(settings: ConfigValues) -> list[str]:
    edits = [] if settings["checkpoint"]["background"] else ["checkpoint.background=true"]
    return edits + _rarer(settings, "every", "checkpoint")


def _rarer(settings: ConfigValues, key: str, *sections: str) -> list[str]:
    """A quarter as often, at least once a run; nothing if the run chooses the interval itself (`auto`)."""
    every = functools.reduce(operator.getitem, sections, settings)[key]
    steps = settings["train"]["steps"]
    if every == "auto":
        return []
    rarer = min(4 * every, steps) if every and steps else 4 * (every or 0)
    return [f"{'.'.join(sections)}.{key}={rarer}"] if every and rarer > every else []
