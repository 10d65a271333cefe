"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, BF16_Optimizer and the universal format, without DeepSpeed.

Weights are the fp32 ones that the optimizer trained. Some of what is here DeepSpeed's own tools lose: frozen parameters
of stage 1, all of BF16_Optimizer, buffers and param groups of universal checkpoints.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.importers.deepspeed.files import LATEST, TagFolder, Tree, need, optional, shape_in
from terrazzo.checkpoint.importers.deepspeed.flat import Partitioned, read_stage_1_or_2, read_stage_3, striped
from terrazzo.checkpoint.importers.deepspeed.tensor import join
from terrazzo.checkpoint.importers.deepspeed.trained import Trained, optimizer_name, scaler_counters
from terrazzo.checkpoint.importers.deepspeed.universal import alike, read_universal, refuse_mixed_up
from terrazzo.checkpoint.importers.deepspeed.unsharded import read_unsharded
from terrazzo.checkpoint.importers.parts.numbering import ModelNames
from terrazzo.checkpoint.importers.parts.optimizer import add_optimizer
from terrazzo.checkpoint.importers.parts.state_dict import StateDictSource, add_extra
from terrazzo.checkpoint.importers.parts.values import Values
from terrazzo.checkpoint.source import BUFFER, WEIGHT, OptimizerInfo, StateInfo, TensorInfo
from terrazzo.errors import BadInput, Damaged

__all__ = ["DeepSpeedCheckpoint", "recognises"]

_TAIL_BYTES = 4096

# Entries of the model's file that are taken over elsewhere, or say how it was written.
_NOT_EXTRA = {
    *("module", "buffer_names", "shared_params", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("optimizer", "global_steps", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version", "universal_checkpoint_info"),
}
_NAMELESS = (
    "neither the optimizer's state nor fp32 weights of its own are taken over: stage 0 does not say which parameters"
    " they are of, and they fit in no way or in several. Save the checkpoint with ZeRO stage 1"
)


class DeepSpeedCheckpoint(StateDictSource):
    """The folder that was given to `save_checkpoint`, or that of one tag in it.

    Raises:
        BadInput: it is damaged or not complete, of pipeline or expert parallelism, or of tensor parallelism without a
            word of how its parts fit together.
    """

    format = "DeepSpeed"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._tag = TagFolder(path)
        if self._tag.zero is None and self._tag.model.get("param_shapes") is None:
            saved = optional(self._tag.model, "optimizer", self._tag.where)
            self._add_module({})
            self._add_unsharded(saved)
        else:
            saved, trained = self._sharded()
            self._add_module(trained.states)
            self._add_trained(trained)
        self._add_rest(saved)

    def add(self, name: str, kind: str, values: Values) -> None:
        super().add(name, kind, values)
        if kind == BUFFER:
            self.tensors[name] = TensorInfo(values.shape, {BUFFER: StateInfo(values.dtype, values.numel)})

    def _sharded(self) -> tuple[Tree, Trained]:
        """What was saved of the optimizer, at least by rank 0, and what is in it."""
        tag = self._tag
        if tag.zero is not None:
            saved = tag.universal_optimizer(tag.zero)
            refuse_mixed_up(tag, saved)
            return saved, read_universal(tag.zero, tag.shapes, saved)
        where = str(tag.folder)
        if tag.tensor_ranks > 1:
            groups = [self._optimizers(rank) for rank in range(tag.tensor_ranks)]
            shapes = map(tag.shapes_in, tag.tensor_models)
            parts = [read_stage_1_or_2(*each, where) for each in zip(shapes, groups, strict=True)]
            return groups[0][0], join(parts, tag.model["universal_checkpoint_info"], where)
        ranks = self._optimizers()
        read = read_stage_3 if tag.stage_3 else read_stage_1_or_2
        return ranks[0], read(tag.shapes, ranks, where)

    def _optimizers(self, tensor_rank: int = 0) -> list[Tree]:
        ranks = self._tag.optimizers(tensor_rank)
        counts = ranks[0].get("partition_count")
        if any(count != len(ranks) for count in (counts if isinstance(counts, list) else [counts])):
            raise BadInput(f"'{self._tag.folder}' has files of {len(ranks)} ranks, and they were written for {counts}.")
        return ranks

    def _add_module(self, trained: Mapping[str, Mapping[str, Values]]) -> None:
        """All that the model's state dict lists: what was trained, other parameters, buffers, and further names."""
        model, where = self._tag.model, self._tag.where
        module = {str(name): value for name, value in need(model, "module", dict, where).items()}
        buffers = {str(name) for name in need(model, "buffer_names", list, where)}
        firsts: dict[object, str] = {}
        for name, value in module.items():
            first = self._first_name(name, value, firsts)
            if name in trained:
                self._add_states(name, trained[name])
            elif not isinstance(value, Values):
                self._leave(name, value)
            elif first != name:
                self.aliases[self.rename(name)] = self.rename(first)
            elif (untrained := self._untrained(name, value, name in buffers)) is not None:
                self.add(self.rename(name), BUFFER if name in buffers else WEIGHT, untrained)
        if lost := [*(trained.keys() - module.keys()), *(set(self.aliases.values()) - self.tensors.keys())]:
            raise Damaged(f"'{where}' is not what DeepSpeed writes: the model has no '{min(lost)}'.")

    def _first_name(self, name: str, value: Any, firsts: dict[object, str]) -> str:
        """The name that stands for all names of a tied tensor."""
        if not isinstance(value, Values):
            return name
        first = firsts.setdefault(value.identity or name, name)
        shared = optional(self._tag.model, "shared_params", self._tag.where)
        if name in shared and (self._tag.stage_3 or value.numel):  # all that have no elements seem to be shared
            return str(shared[name])
        return first

    def _untrained(self, name: str, value: Values, is_buffer: bool) -> Values | None:
        """A buffer or frozen parameter. None, with a note, where its values were not saved."""
        tag = self._tag
        sharded = tag.stage_3 and not is_buffer
        if tag.tensor_parallel and (sharded or not alike([module.get(name) for module in tag.tensor_parallel])):
            raise BadInput(
                f"'{name}' in '{tag.folder}' was not trained, and ranks of tensor parallelism have parts of it. How"
                " they fit together is not written: load it with DeepSpeed and save the state dict of the whole model."
            )
        if not sharded:
            return value
        shapes = optional(tag.model, "frozen_param_shapes", tag.where)
        if name not in shapes:
            self.notes.append(f"{name} is not taken over: it is a further name of another parameter, or was not saved")
            return None
        shape = shape_in(shapes, name, tag.where)
        fragments = [need(model, "frozen_param_fragments", dict, str(tag.folder)) for model in tag.models]
        parts = [need(tree, name, Values, str(tag.folder)) for tree in fragments]  # type: ignore[type-abstract]
        return Partitioned(parts, striped(shape, len(parts)), f"'{name}' in '{tag.folder}'")

    def _add_states(self, name: str, states: Mapping[str, Values]) -> None:
        for kind, values in states.items():
            self.add(self.rename(name), kind, values)

    def _add_trained(self, trained: Trained) -> None:
        groups = [{**group, "params": [self.rename(name) for name in group["params"]]} for group in trained.groups]
        self.optimizer = OptimizerInfo("", groups)
        self.optimizer_notes += dict.fromkeys(trained.notes)

    def _add_unsharded(self, optimizer: Tree) -> None:
        """What stage 0 saved of the optimizer, which says only in what order it had its parameters."""
        if not optimizer:
            return
        model = {name: self.values(name, WEIGHT) for name, info in self.tensors.items() if WEIGHT in info.states}
        try:
            if "optimizer_state_dict" not in optimizer:
                add_optimizer(self, optimizer, ModelNames(list(model)))
            elif (trained := read_unsharded(optimizer, model, self._tag.where)) is not None:
                for name, states in trained.states.items():
                    self._add_states(name, states)
                self._add_trained(trained)
        except Damaged:
            raise
        except BadInput:
            self.optimizer = None
        if self.optimizer is None:
            self.optimizer_notes.append(_NAMELESS)

    def _add_rest(self, optimizer: Tree) -> None:
        model = self._tag.model
        steps = model.get("global_steps")
        self.step = steps if type(steps) is int and steps > 0 else 0
        if self.optimizer is not None:
            scaler = scaler_counters(optimizer, model.get("skipped_steps"))
            self.optimizer = replace(self.optimizer, name=optimizer_name(model.get("ds_config")), scaler=scaler)
        add_extra(self, {key: value for key, value in model.items() if key not in _NOT_EXTRA and value is not None})
        self.identity = _digest(self._tag.read)


def recognises(path: Path) -> bool:
    """Whether `path` is such a folder, complete or not."""
    return any((path / name).is_file() for name in LATEST) or any(path.glob("*mp_rank_*_model_states.pt"))


def _digest(files: Iterable[Path]) -> str:
    """A digest of the end of each file, where archives have the checksums of what is in them."""
    digest = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            digest.update(f"{path.name} {size} ".encode() + file.read())
    return digest.hexdigest()
