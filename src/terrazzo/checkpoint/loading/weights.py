"""Full weights of a checkpoint as a mapping that a model loads, put together as the model has them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from terrazzo.checkpoint.hub_names import hub_tensors, pretrained_model
from terrazzo.checkpoint.importers.parts.state_dict import StateDictSource
from terrazzo.checkpoint.importers.parts.values import Values
from terrazzo.checkpoint.loading.load import open_source
from terrazzo.checkpoint.source import BUFFER, WEIGHT, Source
from terrazzo.checkpoint.tied_names import names_apart
from terrazzo.engine import find_engine, is_sharded, parameter_table, parameters_by_names, persistent_buffers
from terrazzo.errors import BadInput
from terrazzo.exchange import together

__all__ = ["SourceWeights", "load_weights", "weights_for"]


def load_weights(model: nn.Module, source: str | os.PathLike[str] | Mapping[str, Tensor]) -> None:
    """Load full weights into a model. Collective of a sharded one, which takes one tensor at a time.

    Args:
        source: a mapping of names to full tensors, or the path of a checkpoint of any format. A folder that has a
            layer's experts apart is read for a model of `transformers` that has them as stacks.

    Raises:
        BadInput: a rank cannot read the files, or they have different values of what is tied in the model; on every
            rank. Missing, unexpected and misshapen names raise as in `load_state_dict`.
    """
    model.load_state_dict(source if isinstance(source, Mapping) else weights_for(model, source))


def weights_for(
    model: nn.Module, path: str | os.PathLike[str], named: Callable[[str], str] = str, part: str | None = None
) -> SourceWeights:
    """The weights of the checkpoint `path` under the model's names. Collective of a sharded model.

    Args:
        named: from a name in the model to that without what was put around its modules since.
        part: leave out names that have it in them.

    Raises:
        BadInput: as of `open_source`, for parts of a tensor that have different dtypes, and for what is one tensor in
            the model and has other values under each of its names.
    """
    sharded = find_engine(model) is not None
    source = together(lambda: open_source(path), BadInput) if sharded else open_source(path)
    groups = [*parameters_by_names(model), *(buffer.names for buffer in persistent_buffers(model))]
    groups = [[named(name) for name in names] for names in groups if part is None or part not in names[0]]
    base = pretrained_model(model)
    check_ties = functools.partial(_check_ties, source, groups)
    if sharded:
        together(check_ties, BadInput)
    else:
        check_ties()
    absent = {name for names in groups if source.resolve(names) is None for name in names}
    if base is not None and absent and isinstance(source, StateDictSource):
        _join(source, base, {named(name): shape for name, shape in _shapes(model).items()}, absent)
    return SourceWeights(source, groups)


def _check_ties(source: Source, groups: Iterable[Sequence[str]]) -> None:
    if (apart := next(names_apart(source, groups), None)) is not None:
        raise BadInput(
            f"{apart[0]} and {apart[1]} are one tensor in the model, and differ in the checkpoint '{source.where}':"
            " build the model without that tie, in a configuration with model.tie_embeddings=false, or remove from the"
            " checkpoint the one that is not meant."
        )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's whole tensors, by all of their names."""
    if is_sharded(model):
        shapes = {name: each.shape for each in parameter_table(model) for name in each.names}
    else:
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
    return shapes | {name: tuple(each.tensor.shape) for each in persistent_buffers(model) for name in each.names}


def _join(source: StateDictSource, base: nn.Module, shapes: Mapping[str, tuple[int, ...]], absent: set[str]) -> None:
    """Have the source give the tensors of `absent` that it has in parts; what it lacks parts of stays absent."""
    try:
        parts_of = hub_tensors(base, shapes)
    except BadInput:  # whose names are then missed
        return
    for name in parts_of.keys() & absent:
        parts = [source.resolve([part.name]) for part in parts_of[name]]
        there = [part for part in parts if part is not None]
        sizes = [source.tensors[part].shape for part in there]
        if there and sizes == [part.shape for part in parts_of[name]]:
            joined = StackedValues(shapes[name], {part: source.values(part, WEIGHT) for part in there}, source.where)
            for part in there:
                del source.tensors[part]
            source.add(name, WEIGHT, joined)


class StackedValues(Values):
    """A tensor of which others are the elements, one after the other.

    Raises:
        BadInput: they have different dtypes; `where` is what they are in.
    """

    def __init__(self, shape: tuple[int, ...], parts: Mapping[str, Values], where: str) -> None:
        self.shape, self._parts = shape, list(parts.values())
        self.dtype = self._parts[0].dtype
        if other := [name for name, part in parts.items() if part.dtype != self.dtype]:
            raise BadInput(
                f"'{where}' has '{next(iter(parts))}' as {self.dtype} and '{other[0]}' as {parts[other[0]].dtype}, "
                "which are parts of one tensor of the model: save them in one dtype."
            )

    def read(self, start: int, stop: int) -> Tensor:
        values, first = [torch.empty(0, dtype=self.dtype)], 0
        for part in self._parts:
            last = first + part.numel
            if start < last and first < stop:
                values.append(part.read(max(start, first) - first, min(stop, last) - first))
            first = last
        return torch.cat(values)


class SourceWeights(Mapping[str, Tensor]):
    """The full weights and buffers of a checkpoint as a mapping; each look-up reads one tensor.

    Args:
        groups: all names of each tensor of a model. What the checkpoint has under one of them is there under all. What
            it has beside these is there under its own name.
    """

    def __init__(self, source: Source, groups: Iterable[Sequence[str]]) -> None:
        self._source = source
        self._listed: dict[str, str] = {}
        for names in groups:
            if (resolved := source.resolve(names)) is not None:
                self._listed |= {name: source.resolve([name]) or resolved for name in names}
        wanted = set(self._listed.values())
        self._listed |= {name: name for name in source.tensors if name not in wanted}

    def __getitem__(self, name: str) -> Tensor:
        listed = self._listed[name]
        kind = BUFFER if BUFFER in self._source.tensors[listed].states else WEIGHT
        return self._source.whole(listed, kind)

    def __contains__(self, name: object) -> bool:
        return name in self._listed  # the mixin's would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)
