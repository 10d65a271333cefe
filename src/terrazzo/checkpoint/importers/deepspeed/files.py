"""The files of a DeepSpeed checkpoint: which there are, which there should be, and what is in one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from terrazzo.checkpoint.importers.parts.paths import size_of_plain_file, subfolder
from terrazzo.checkpoint.importers.parts.tree import Unusable, as_tree
from terrazzo.checkpoint.importers.parts.unpickle import StandIn, load_torch_file
from terrazzo.errors import BadInput, Damaged

__all__ = [
    "LATEST",
    "Shape",
    "TagFolder",
    "Tree",
    "is_name",
    "missing",
    "need",
    "open_file",
    "optional",
    "shape_in",
]

Tree = Mapping[str, Any]
Shape = tuple[int, ...]
T = TypeVar("T")

LATEST = ("latest", "latest_universal")

_MODEL = "mp_rank_00_model_states.pt"
_MODEL_OF_RANK = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
_OPTIMIZER_OF_RANK = "zero_pp_rank_{}_mp_rank_{:02}_optim_states.pt"
_OPTIMIZER_OF_BF16_RANK = "bf16_" + _OPTIMIZER_OF_RANK
_MODEL_OF_TENSOR_RANK = re.compile(r"(zero_pp_rank_0_)?mp_rank_\d+_model_states\.pt")
_MAX_RANKS = 1 << 20

_SAVE_WHOLE = "load it with DeepSpeed and save the state dict of the whole model with torch.save"
_PIPELINE = f"is of pipeline parallelism, which names and stores parameters by layer: {_SAVE_WHOLE}"
_TENSOR = (
    "is of tensor parallelism, and does not say how its parts fit together: convert it with"
    " deepspeed/checkpoint/ds_to_universal.py and import that"
)
_NOT_READ = {
    r"layer_\d+-.*": _PIPELINE,
    r"(layer_\d+_)?expert_.*|expp_rank_.*": f"is of expert parallelism, with files for each expert: {_SAVE_WHOLE}",
    r"offloaded_tensors": "has what was offloaded to NVMe, in a layout that only the run that wrote it knows: load it"
    " with DeepSpeed without NVMe and save it again",
}


class _Foreign(Unusable):
    """Stands for an object that is not state of the training: it is left out, and a note says so."""

    reason = "it is an object of another library"

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(_SCALERS, name): StandIn for name in ("LossScaler", "DynamicLossScaler")},
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): StandIn,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): StandIn,
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): StandIn,
    ("builtins", "getattr"): StandIn,  # how some versions of Python pickle members of an Enum
    ("numpy.core.multiarray", "_reconstruct"): _Foreign,
    ("numpy.core.multiarray", "scalar"): _Foreign,
    ("numpy._core.multiarray", "_reconstruct"): _Foreign,
    ("numpy._core.multiarray", "scalar"): _Foreign,
    ("numpy", "ndarray"): _Foreign,
    ("numpy", "dtype"): _Foreign,
    ("argparse", "Namespace"): _Foreign,
    ("pathlib", "PosixPath"): _Foreign,
}


class TagFolder:
    """The files of one step.

    Args:
        path: their folder, or the one above with a file `latest` that names it.

    Attributes:
        where: the model's file of rank 0, for messages, and `model` what is in it.
        stage_3: whether every rank has a file of the model.
        zero: the folder of a universal checkpoint's parameters.
        read: the files that were opened.

    Raises:
        BadInput: it is no such folder, or of a layout that is not imported.
    """

    def __init__(self, path: Path) -> None:
        self.folder = _find_tag(path)
        self.zero = subfolder(self.folder, "zero")
        self._names = {entry.name for entry in self.folder.iterdir()}
        self._refuse_files()
        self.stage_3 = _MODEL not in self._names
        first = _MODEL_OF_RANK.format(0) if self.stage_3 and self._has("model") else _MODEL
        missing(self.folder, [first], self._names)
        self.read: list[Path] = []
        self.where, self.model = str(self.folder / first), self.open(first)
        self.world_size = need(self.model, "dp_world_size", int, self.where)
        if not 0 < self.world_size <= _MAX_RANKS:
            raise Damaged(f"'{self.where}' is not what DeepSpeed writes: dp_world_size is {self.world_size}.")
        if self.model.get("module") is None:
            raise BadInput(f"'{self.where}' {_PIPELINE}.")
        self.tensor_ranks = need(self.model, "mp_world_size", int, self.where) if self.zero is None else 1
        if self.zero is None:
            self._refuse_parts()

    def open(self, name: str) -> Tree:
        """What a file of the folder holds. Raises `BadInput`."""
        return self._opened(self.folder, name)

    def universal_optimizer(self, zero: Path) -> Tree:
        """What the folder of a universal checkpoint's parameters says of the optimizer. Raises `BadInput`."""
        return self._opened(zero, "optimizer_state.pt")

    @property
    def shapes(self) -> list[dict[str, Shape]]:
        """The shapes of the parameters in each flat group, in the order they have there. Raises `Damaged`."""
        return self.shapes_in(self.model)

    def shapes_in(self, model: Tree) -> list[dict[str, Shape]]:
        """The same of what a rank of tensor parallelism has. Raises `Damaged`."""
        groups = need(model, "param_shapes", list, self.where)
        trees = [need(groups, index, dict, self.where) for index in range(len(groups))]
        return [{str(name): shape_in(tree, name, self.where) for name in tree} for tree in trees]

    @cached_property
    def models(self) -> list[Tree]:
        """What each rank of stage 3 saved of the model. Raises `BadInput`."""
        names = [_MODEL_OF_RANK.format(rank) for rank in range(self.world_size)]
        missing(self.folder, names, self._names)
        return [self.model, *map(self.open, names[1:])]

    @cached_property
    def tensor_models(self) -> list[Tree]:
        """What each rank of tensor parallelism saved of the model. Raises `BadInput`."""
        names = [f"mp_rank_{rank:02}_model_states.pt" for rank in range(self.tensor_ranks)]
        missing(self.folder, names, self._names)
        return [self.model, *map(self.open, names[1:])]

    @cached_property
    def tensor_parallel(self) -> list[Tree]:
        """What each rank of tensor parallelism has of the model; empty without. Raises `BadInput`."""
        if need(self.model, "mp_world_size", int, self.where) == 1:
            return []
        names = sorted(filter(_MODEL_OF_TENSOR_RANK.fullmatch, self._names))
        return [need(self.open(name), "module", dict, str(self.folder / name)) for name in names]

    def optimizers(self, tensor_rank: int = 0) -> list[Tree]:
        """What each data rank saved of the optimizer. Raises `Damaged` with all files that are missing."""
        ranks, kinds = range(self.world_size), (_OPTIMIZER_OF_BF16_RANK, _OPTIMIZER_OF_RANK)
        bf16, plain = ([name.format(rank, tensor_rank) for rank in ranks] for name in kinds)
        names = bf16 if self._names.intersection(bf16) else plain
        if names is bf16 and self._names.intersection(plain):
            raise BadInput(
                f"'{self.folder}' has files of two checkpoints, {bf16[0]} and {plain[0]}: remove the others."
            )
        models = [_MODEL_OF_RANK.format(rank) for rank in ranks] if self.stage_3 else []
        missing(self.folder, [*models, *names], self._names)
        return [need(self.open(name), "optimizer_state_dict", dict, str(self.folder / name)) for name in names]

    def _opened(self, folder: Path, name: str) -> Tree:
        content = open_file(folder, name)
        self.read.append(folder / name)
        if not isinstance(content, dict):
            raise Damaged(f"'{folder / name}' is not what DeepSpeed writes: it holds a {type(content).__name__}.")
        return content

    def _has(self, kind: str) -> bool:
        return any(name.startswith("zero_pp_rank_") and name.endswith(f"_{kind}_states.pt") for name in self._names)

    def _refuse_parts(self) -> None:
        """Files of ranks of tensor parallelism, but for those whose parts can be put together."""
        for name in sorted(self._names):
            rank = re.search(r"mp_rank_(\d+)_", name)
            if rank is not None and int(rank[1]) >= self.tensor_ranks:
                raise BadInput(f"'{self.folder / name}' {_TENSOR}.")
        has_shapes = isinstance(self.model.get("universal_checkpoint_info"), dict) and self.model.get("param_shapes")
        if self.tensor_ranks > 1 and (self.stage_3 or not has_shapes):
            raise BadInput(f"'{self.where}' {_TENSOR}.")

    def _refuse_files(self) -> None:
        for name in sorted(self._names):
            for pattern, reason in _NOT_READ.items():
                if re.fullmatch(pattern, name):
                    raise BadInput(f"'{self.folder / name}' {reason}.")


def _find_tag(path: Path) -> Path:
    for name in LATEST:
        if not (path / name).exists():
            continue
        if size_of_plain_file(path, name) > 4096:
            raise BadInput(f"'{path / name}' holds no name of a folder: it is damaged.")
        tag = (path / name).read_text(encoding="utf-8", errors="replace").strip()
        folder = subfolder(path, tag) if is_name(tag) else None
        if folder is None:
            raise BadInput(
                f"'{path / name}' names {tag!r}, and '{path}' has no such folder: give the folder to import."
            )
        return folder
    return path


def is_name(text: str) -> bool:
    """Whether it can be the name of an entry of a folder."""
    return text not in ("", ".", "..") and "\0" not in text and Path(text).name == text


def missing(folder: Path, wanted: Iterable[str], names: Iterable[str]) -> None:
    """Raise `Damaged` with all names that are wanted and not there."""
    there = set(names)
    if lacking := [name for name in wanted if name not in there]:
        raise Damaged(f"'{folder}' is not complete, it lacks {', '.join(lacking)}: copy it again from where it is.")


def open_file(folder: Path, name: str) -> Any:
    """What a file holds, as a tree. Raises `BadInput`."""
    size_of_plain_file(folder, name)
    return as_tree(load_torch_file(folder / name, _ALLOWED), str(folder / name))


def need(tree: Any, key: Any, kind: type[T], where: str) -> T:
    """An entry that must be there. Raises `Damaged`; `where` names the file."""
    try:
        value = tree[key]
    except (KeyError, IndexError, TypeError):
        value = None
    if not isinstance(value, kind):
        raise Damaged(
            f"'{where}' is not what DeepSpeed writes: {key!r} is {type(value).__name__}, not {kind.__name__}."
        )
    return value


def optional(tree: Tree, key: str, where: str) -> Tree:
    """An entry that is a mapping, empty where it is None or not there. Raises `Damaged`."""
    return need(tree, key, dict, where) if tree.get(key) is not None else {}


def shape_in(tree: Any, name: Any, where: str) -> Shape:
    """An entry that is a shape. Raises `Damaged`."""
    sizes = need(tree, name, list, where)
    if not all(type(size) is int and size >= 0 for size in sizes) or math.prod(sizes) >= 1 << 62:
        raise Damaged(f"'{where}' is not what DeepSpeed writes: {name!r} has no shape.")
    return tuple(sizes)
