"""A torch.distributed.checkpoint folder from any checkpoint: `dcp.load` reads it into FSDP2 or any other parallelism.

Both layouts that `get_state_dict` has for an optimizer are there, so a program loads whichever it uses. The states,
such as `optim.state.<name>.exp_avg`, are the same in both; hyper-parameters are under `optim.param_groups.<index>.lr`
and, for `flatten_optimizer_state_dict`, under `optim.param_groups.<name>.lr`.

The folder is as `dcp.save` would write it, but not written by it: its file writer keeps every tensor of a file until
the file is complete, so in one process the whole model. Entries of equal content share their bytes here.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from terrazzo.checkpoint.exporters.new_folder import new_file, new_folder
from terrazzo.checkpoint.importers.dcp_metadata import METADATA_FILE, TreePath
from terrazzo.checkpoint.source import (
    BUFFER,
    PIECE_BYTES,
    WEIGHT,
    OptimizerInfo,
    Source,
    StateInfo,
    TensorInfo,
    is_of_optimizer,
)
from terrazzo.engine.states.state_names import is_numbered
from terrazzo.errors import BadInput

__all__ = ["export_dcp"]

DATA_FILE = "__0_0.distcp"
ENTRY_BYTES = 4096  # of description for one entry, at most
# Kinds that are zero before the first step.
ADAM_KINDS = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def export_dcp(source: Source, out: Path, names: tuple[str, str] = ("model", "optim")) -> None:
    """Write weights, buffers and optimizer state of `source` as the DCP folder `out`, which must not exist.

    A tied tensor is under all of its names. Hyper-parameters that the source does not have, and torch's optimizer of
    that name does, get torch's defaults. Parameters of Adam without state get the zeros that it would begin with, so
    that a strict load finds them. Memory: a piece of one tensor, at least one row of it.

    Args:
        names: what the entries of the model and of the optimizer stand under; an empty name puts them at the top.
            torchtitan's are `("", "optimizer")`.

    Raises:
        BadInput: `out` exists, there is too little space for it, or the source is damaged.
        SaveFailed: a file could not be written; nothing is left.
    """
    model, optimizer = ((name,) if name else () for name in names)
    with new_folder(out, _size_bytes(source)) as folder:
        with new_file(folder / DATA_FILE) as file:
            writer = _Writer(file)
            _add_model(writer, model, source)
            if source.optimizer is not None:
                _add_states(writer, optimizer, source)
                _add_zeros(writer, optimizer, source, source.optimizer)
                _add_groups(writer, optimizer, source.optimizer)
        with new_file(folder / METADATA_FILE) as file:
            pickle.dump(writer.metadata, file)


class _Writer:
    """Appends to the data file and notes what is where."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._entries: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
        self._places: dict[str, TreePath] = {}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}

    @property
    def metadata(self) -> Metadata:
        """What torch unpickles to find the entries."""
        return Metadata(self._entries, planner_data=self._places, storage_data=self._stored)

    def add_tensor(
        self, places: Iterable[TreePath], shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[int, int], Tensor]
    ) -> None:
        """A tensor at each of `places`. `read` gives a range of its elements, flat and row-major."""
        boxes = list(_boxes(shape, dtype.itemsize))
        keys = [self._enter(place) for place in places]
        for key in keys:
            self._entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), boxes)
        start = 0
        for box in boxes:
            stop = start + math.prod(box.sizes)
            values = read(start, stop).view(box.sizes)
            is_part = values.untyped_storage().nbytes() != values.nbytes  # torch.save would write the whole
            stored = self._store(values.clone() if is_part else values)
            self._stored |= {MetadataIndex(key, box.offsets): stored for key in keys}
            start = stop

    def add_value(self, places: Iterable[TreePath], value: object) -> None:
        """A plain value at each of `places`."""
        stored = self._store(value)
        for key in [self._enter(place) for place in places]:
            self._entries[key] = BytesStorageMetadata()
            self._stored[MetadataIndex(key)] = stored

    def _enter(self, place: TreePath) -> str:
        key = ".".join(map(str, place))
        if key in self._places:
            raise BadInput(f"Two entries would be called '{key}' in the export: rename the parameter in the model.")
        self._places[key] = place
        return key

    def _store(self, value: object) -> _StorageInfo:
        start = self._file.tell()
        try:
            torch.save(value, self._file)
        except RuntimeError as error:  # torch closes its archive after a write that failed, and complains of that
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        return _StorageInfo(DATA_FILE, start, self._file.tell() - start)


def _boxes(shape: tuple[int, ...], itemsize: int) -> Iterator[ChunkStorageMetadata]:
    """A tensor cut into runs of whole rows of the first dim, each of a piece's size or one row."""
    if 0 in shape or not shape:
        yield ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        return
    rows = max(1, PIECE_BYTES // (math.prod(shape[1:]) * itemsize))
    for first in range(0, shape[0], rows):
        offsets = torch.Size([first, *[0] * (len(shape) - 1)])
        yield ChunkStorageMetadata(offsets, torch.Size([min(rows, shape[0] - first), *shape[1:]]))


def _size_bytes(source: Source) -> int:
    """The bytes of what is written of a source."""
    states = [info.states[kind] for info in source.tensors.values() for kind in (WEIGHT, BUFFER) if kind in info.states]
    if source.optimizer is not None:
        states += [state for info in source.tensors.values() for state in _optimizer_states(info).values()]
    return sum(state.numel * state.dtype.itemsize + ENTRY_BYTES for state in states) + ENTRY_BYTES


# -- what is in the folder -----------------------------------------------------------------------------------------


def _add_model(writer: _Writer, root: TreePath, source: Source) -> None:
    names = {name: [name] for name in source.tensors}
    for alias, name in source.aliases.items():
        names[name].append(alias)
    for name, info in source.tensors.items():
        kind = WEIGHT if WEIGHT in info.states else BUFFER
        if kind in info.states:
            places = [(*root, known) for known in names[name]]
            writer.add_tensor(places, info.shape, info.states[kind].dtype, _reader(source, name, kind))


def _add_states(writer: _Writer, root: TreePath, source: Source) -> None:
    per_element = _per_element(source)
    for name, info in source.tensors.items():
        for kind, state in _optimizer_states(info).items():
            shape = info.shape if kind in per_element else () if state.numel == 1 else (state.numel,)
            writer.add_tensor([(*root, "state", name, kind)], shape, state.dtype, _reader(source, name, kind))


def _optimizer_states(info: TensorInfo) -> dict[str, StateInfo]:
    """The optimizer's states; of replicas that train by themselves the first one's, as the format has one optimizer."""
    return {kind: state for kind, state in info.states.items() if is_of_optimizer(kind) and not is_numbered(kind)}


def _reader(source: Source, name: str, kind: str) -> Callable[[int, int], Tensor]:
    return lambda start, stop: source.read_with_progress(name, kind, start, stop)


def _per_element(source: Source) -> set[str]:
    """The kinds of state with a value for each element. One tensor of one element cannot tell, all together can."""
    kinds = {kind for info in source.tensors.values() for kind in info.states} - {"step"}
    return {
        kind
        for kind in kinds
        if all(info.states[kind].numel == info.numel for info in source.tensors.values() if kind in info.states)
    }


def _add_zeros(writer: _Writer, root: TreePath, source: Source, optimizer: OptimizerInfo) -> None:
    """States of the optimizer's parameters that have none; parameters of the same shape share theirs."""
    infos = source.tensors.values()
    dtypes = {kind: state.dtype for info in infos for kind, state in _optimizer_states(info).items()}
    if not dtypes.keys() <= ADAM_KINDS:
        return
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in (name for group in optimizer.groups for name in group["params"]):
        if not _optimizer_states(source.tensors[name]):
            alike[source.tensors[name].shape].append(name)
    for kind, dtype in dtypes.items():
        for shape, names in alike.items():
            places = [(*root, "state", name, kind) for name in names]
            writer.add_tensor(places, () if kind == "step" else shape, dtype, _zeros(dtype))


def _zeros(dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    return lambda start, stop: torch.zeros(stop - start, dtype=dtype)


def _add_groups(writer: _Writer, root: TreePath, optimizer: OptimizerInfo) -> None:
    defaults = _defaults(optimizer.name)
    for index, group in enumerate(optimizer.groups):
        parameters = list(group["params"])
        writer.add_value([(*root, "param_groups", index, "params")], parameters)
        for key, value in {**defaults, **group, "param_names": parameters}.items():
            if key == "params":
                continue
            places: list[TreePath] = [(*root, "param_groups", index, key)]
            places += [(*root, f"param_groups.{name}.{key}") for name in parameters]
            is_tuple = isinstance(value, list) and key != "param_names"  # JSON has no tuples, torch has no other lists
            writer.add_value(places, tuple(value) if is_tuple else value)


def _defaults(optimizer: str) -> Mapping[str, Any]:
    """The hyper-parameters of torch's optimizer of that name; none for another's."""
    kind = getattr(torch.optim, optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        return {}
    return kind([torch.nn.Parameter(torch.zeros(1, 1))]).defaults  # type: ignore[call-arg]
