"""DeepSpeed's universal checkpoints: a folder for each parameter, a file for each of its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.importers.deepspeed.files import Shape, TagFolder, Tree, is_name, missing, need, open_file
from terrazzo.checkpoint.importers.deepspeed.flat import single, state_of
from terrazzo.checkpoint.importers.deepspeed.trained import EXPERTS, Trained, add_groups
from terrazzo.checkpoint.importers.parts.paths import subfolder
from terrazzo.checkpoint.importers.parts.values import Values
from terrazzo.checkpoint.source import BUFFER, WEIGHT
from terrazzo.engine.partition.rectangles import Rectangle
from terrazzo.errors import BadInput, Damaged

__all__ = ["alike", "read_universal", "refuse_mixed_up"]


class StoredTensor(Values):
    """A tensor that has a file of its own, which is open while it is read.

    Args:
        shape: of the parameter. From stage 3 it is saved flat; else the file's own shape counts, for that of a
            parameter of tensor parallelism is only of a part.

    Raises:
        BadInput: there is another thing in the file.
    """

    def __init__(self, folder: Path, name: str, shape: Shape) -> None:
        self._folder, self._name = folder, name
        values = self._values()
        flat = len(values.shape) == 1 != len(shape)
        self.shape, self.dtype = shape if flat else values.shape, values.dtype
        if self.numel != values.numel:
            raise Damaged(f"'{folder / name}' has {values.numel} elements, and the parameter {list(shape)}.")

    def read(self, start: int, stop: int) -> Tensor:
        return self._values().read(start, stop)

    def read_box(self, part: Rectangle) -> Tensor:
        values = self._values()
        return values.read_box(part) if values.shape == self.shape else super().read_box(part)

    def _values(self) -> Values:
        where, content = str(self._folder / self._name), open_file(self._folder, self._name)
        if isinstance(content, Mapping) and content.get("is_expert_param"):
            raise BadInput(EXPERTS.format(where))
        return need(content if isinstance(content, Mapping) else {"param": content}, "param", Values, where)  # type: ignore[type-abstract]


def read_universal(zero: Path, shapes: Sequence[Mapping[str, Shape]], optimizer: Tree) -> Trained:
    """What is in the folder `zero` of a universal checkpoint.

    Args:
        shapes: of the parameters of each group (from stage 3: sub-group).
        optimizer: what the folder says of the optimizer.

    Raises:
        BadInput: it is damaged, or of experts.
    """
    where, trained = str(zero), Trained()
    names = [name for group_shapes in shapes for name in group_shapes]
    missing(zero, names, [name for name in names if is_name(name) and subfolder(zero, name) is not None])
    for index, group_shapes in enumerate(shapes):
        step = state_of(optimizer.get("optimizer_state_dict"), index).get("step")
        for name, shape in group_shapes.items():
            states = _states(zero / name, shape)
            trained.states[name] = states if step is None else states | {"step": single(step, where)}
    add_groups(trained, optimizer, shapes, where)
    return trained


def refuse_mixed_up(tag: TagFolder, optimizer: Tree) -> None:
    """Raise `BadInput` where the conversion cut parameters out of a flat tensor at the wrong places.

    It looks for them where they would be without `round_robin_gradients`, unless they were aligned.
    """
    config, paddings = tag.model.get("ds_config"), optimizer.get("param_alignment_paddings")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if tag.stage_3 or not isinstance(zero, Mapping) or not zero.get("round_robin_gradients"):
        return
    for index, shapes in enumerate(tag.shapes):
        aligned = paddings is not None and any(need(paddings, index, list, tag.where))
        if len(shapes) > tag.world_size > 1 and not aligned:
            raise BadInput(
                f"'{tag.folder}' was converted from a checkpoint with round_robin_gradients, and DeepSpeed mixes up"
                " the parameters of those: import the one that it was made from."
            )


def alike(tensors: Sequence[Any]) -> bool:
    """Whether ranks of tensor parallelism all have the same tensor, whole."""
    whole = [tensor.read(0, tensor.numel) for tensor in tensors if isinstance(tensor, Values)]
    return len(whole) == len(tensors) > 0 and all(torch.equal(whole[0], other) for other in whole[1:])


def _states(folder: Path, shape: Shape) -> dict[str, Values]:
    files = sorted(path.name for path in folder.iterdir() if path.suffix == ".pt")
    missing(folder, ["fp32.pt"], files)
    states: dict[str, Values] = {WEIGHT: StoredTensor(folder, "fp32.pt", shape)}
    for name in files:
        kind = name.removesuffix(".pt")
        if kind == "step":
            states[kind] = single(open_file(folder, name), str(folder / name))
        elif kind not in ("fp32", WEIGHT, BUFFER):
            states[kind] = StoredTensor(folder, name, shape)
    return states
