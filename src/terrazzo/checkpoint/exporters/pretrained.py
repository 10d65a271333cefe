"""A sharded model as a folder that `transformers` loads, straight from its shards and one unit at a time."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrazzo.checkpoint.exporters.huggingface import Planned, planned, write_folder
from terrazzo.checkpoint.hub_folder import ModelDescription, describe_folder
from terrazzo.checkpoint.hub_names import hub_tensors
from terrazzo.checkpoint.source import BUFFER, WEIGHT, Source, StateInfo, TensorInfo
from terrazzo.engine import collect_buffers, engine_of, parameter_table, persistent_buffers, whole_weights
from terrazzo.engine.labels.label import collective_call, labelled
from terrazzo.errors import BadInput, SaveFailed
from terrazzo.exchange import require_alike, together
from terrazzo.given_numbers import is_count

__all__ = ["save_pretrained"]


@labelled(collective_call("tz.save_pretrained(model, folder)"))
def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a sharded model as `transformers` does: safetensors files, their index, config.json. Collective.

    Rank 0 writes. Memory: one unit on the device of every rank, a piece of one tensor in host memory.

    Args:
        folder: appears when it is complete; it must not exist.
        dtype: of all floating-point weights, rounded to nearest; by default trained ones are the master weights.
        max_shard_bytes: a larger model becomes several files and an index. A tensor is never divided.
        config: what config.json says; by default what `model.config` does.

    Raises:
        BadInput: `folder` exists or has too little space, there is no config, a weight is beyond the range of `dtype`,
            the model is of a kind whose folder takes more than names and values, or an argument is none.
        RanksApart: ranks give other arguments.
        SaveFailed: a file could not be written; nothing is left.
    """
    engine_of(model)
    told = together(lambda: _told(folder, dtype, max_shard_bytes, config), BadInput)
    require_alike(told)
    live = _Live(model)

    def plan() -> Planned:
        description, left_out = _describe(model, config, live.shapes())
        live.leave_out(left_out)
        return planned(live, description, dtype, max_shard_bytes)

    plan_of_all = together(plan, BadInput)
    read = [each.origin for members in plan_of_all.shards.values() for each in members if each.kind == WEIGHT]
    order = [name for name, _ in itertools.groupby(read)]  # a tensor is read once for all that lies in it
    live.read_in([name for name in order if live.tensors[name].numel])  # of what has no elements none is asked for

    def write() -> None:
        try:
            if dist.get_rank() == 0:
                write_folder(live, Path(folder), plan_of_all)
        except Exception:
            live.finish()  # the others must not wait for this rank
            raise
        live.finish()

    together(write, SaveFailed)


def _told(
    folder: str | os.PathLike[str], dtype: object, max_shard_bytes: object, config: Mapping[str, Any] | None
) -> dict[str, str]:
    """The arguments in words, to compare them between ranks; raises `BadInput` for what they cannot be."""
    if not isinstance(folder, str | os.PathLike):
        raise BadInput(f"folder is {folder!r}: give the path of a new folder.")
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise BadInput(f"dtype is {dtype!r}: give a floating-point dtype such as torch.bfloat16, or None.")
    if not is_count(max_shard_bytes):
        raise BadInput(f"max_shard_bytes is {max_shard_bytes!r}: give a number of bytes, such as 5_000_000_000.")
    if not isinstance(config, Mapping | None):
        raise BadInput(f"config is a {type(config).__name__}: give a mapping, or None for the model's.")
    try:
        said = json.dumps(None if config is None else dict(config), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise BadInput(f"config cannot be written as config.json: {error}. Give plain values.") from None
    short = hashlib.sha256(said.encode()).hexdigest()[:8]
    return {
        "folder": f"'{os.fspath(folder)}'",
        "dtype": str(dtype),
        "max_shard_bytes": str(max_shard_bytes),
        "config": "None" if config is None else f"one of {len(said)} characters ({short})",
    }


class _Live(Source):
    """A sharded model's weights, which all ranks gather together and the first one reads, in an order that is fixed."""

    format = "a sharded model"
    names_ties = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(type(model).__name__)
        collect_buffers(model)
        buffers = persistent_buffers(model)
        self._model = model
        self._buffers = {each.name: each.tensor for each in buffers}
        listed = parameter_table(model)
        for each in listed:
            self.tensors[each.name] = TensorInfo(each.shape, {WEIGHT: StateInfo(each.dtype, math.prod(each.shape))})
        for name, tensor in self._buffers.items():
            self.tensors[name] = TensorInfo(tuple(tensor.shape), {BUFFER: StateInfo(tensor.dtype, tensor.numel())})
        names = [*(each.names for each in listed), *(each.names for each in buffers)]
        self.aliases = {alias: first for first, *others in names for alias in others}
        self._stream: Iterator[tuple[str, Tensor]] = iter(())
        self._name, self._values = "", torch.empty(0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's tensors, by all of their names."""
        shapes = {name: info.shape for name, info in self.tensors.items()}
        return shapes | {alias: shapes[name] for alias, name in self.aliases.items()}

    def leave_out(self, names: set[str]) -> None:
        """Tensors that are not to be written."""
        self.tensors = {name: info for name, info in self.tensors.items() if name not in names}

    def read_in(self, order: list[str]) -> None:
        """From now on weights can be read, in this order; `finish` has to follow, on every rank."""
        self._stream = whole_weights(self._model, order)

    def _read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        if kind == BUFFER:
            return self._buffers[name].detach().reshape(-1)[start:stop].cpu()
        if name != self._name:
            self._values = torch.empty(0)  # before the next unit comes
            self._name, self._values = next(self._stream)
            assert self._name == name, f"{name} was read in place of {self._name}"
        return self._values.reshape(-1)[start:stop].cpu()

    def finish(self) -> None:
        """Take part in what is still to be gathered."""
        self._values = torch.empty(0)
        for _ in self._stream:
            pass


def _describe(
    model: Any, config: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[ModelDescription, set[str]]:
    """What the folder says beside weights, and names of tensors that it leaves out."""
    if config is not None:
        return ModelDescription(config), set()
    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise BadInput(
            f"This {kind} has adapters: use save_adapter(model, folder) or save_merged(model, folder) of "
            "terrazzo.integrations.peft."
        )
    if not hasattr(getattr(model, "config", None), "to_diff_dict"):
        raise BadInput(
            f"This {kind} has no config of transformers, which config.json would say. Pass config={{...}}, or take "
            "tz.full_state_dict(model) on rank 0."
        )
    with tempfile.TemporaryDirectory() as scratch:
        model.config.save_pretrained(scratch)
        if model.can_generate():
            model.generation_config.save_pretrained(scratch)
        described = describe_folder(Path(scratch))
    config = {**described.config, "architectures": [kind]}
    left_out = set(model._keys_to_ignore_on_save or ())
    return ModelDescription(config, described.files, tensors=hub_tensors(model, shapes)), left_out
