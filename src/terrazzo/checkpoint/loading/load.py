"""Loading a checkpoint of any format on any number of ranks under any plan, by element ranges."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.checkpoint.format.manifest import MANIFEST, SEAL
from terrazzo.checkpoint.format.rank_layout import rank_file_name
from terrazzo.checkpoint.importers import open_foreign
from terrazzo.checkpoint.importers.parts.numbering import ModelNames, NameGroups
from terrazzo.checkpoint.loading.misfits import (
    ROUNDED,
    fitted_groups,
    misfits,
    misfits_of_ties,
    unkept,
    unstepped,
    untied,
)
from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.checkpoint.optimizers import Optimizers, check_optimizers, presence, scaler_of
from terrazzo.checkpoint.rng import restore_rng, rng_problem
from terrazzo.checkpoint.source import BUFFER, WEIGHT, Source
from terrazzo.checkpoint.storage.places import store_and_name
from terrazzo.checkpoint.storage.store import CheckpointFolder
from terrazzo.engine import (
    ModelState,
    Owned,
    TableRow,
    engine_of,
    find_engine,
    parameter_table,
    parameters_by_names,
    persistent_buffers,
)
from terrazzo.engine.labels.label import Label, labelled
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.plan.layout import Range
from terrazzo.errors import BadInput, Damaged, Misuse
from terrazzo.exchange import gather_json, require_alike, together
from terrazzo.files import is_url
from terrazzo.messages import listed, printable, warn

__all__ = ["check_foreign", "load", "open_source", "own_folder", "own_groups", "restore", "warn_of_notes"]


def open_source(path: str | os.PathLike[str], model: torch.nn.Module | None = None, groups: NameGroups = ()) -> Source:
    """The checkpoint `path`, whatever wrote it: see `Source`.

    Args:
        model: gives names to optimizer states of formats that only number them.
        groups: the names in the param groups of the run that goes on with it, in order: where they fit, they tell which
            parameter has which number before the model's own order does.

    Raises:
        Damaged: it is Terrazzo's, and its manifest is not what was written.
        BadInput: there is nothing, or nothing that is known; behind a URL only Terrazzo's own are read.
    """
    _check_path(path)
    if (folder := own_folder(path)) is not None:
        return TerrazzoCheckpoint(folder)
    check_foreign(path)
    if model is None:
        return open_foreign(Path(path))
    trains = {names[0]: parameter.requires_grad for names, parameter in parameters_by_names(model).items()}
    frozen = [name for name, trained in trains.items() if not trained]
    return open_foreign(Path(path), ModelNames(list(trains), frozen, groups))


def own_groups(model: torch.nn.Module) -> list[list[str]]:
    """The names in the param groups of a sharded model's optimizers, in order; none of another model.

    Collective where ranks have stages of it.
    """
    if (engine := find_engine(model)) is None:
        return []
    groups = engine.param_groups()
    if groups and engine.axes.stage_axis:  # each rank lists those of its stage: all, in the model's order
        table = parameter_table(model)
        return [[row.name for row in table if row.group == number] for number, _ in groups]
    names = {id(parameter): listed[0] for listed, parameter in parameters_by_names(model).items()}
    return [[names[id(parameter)] for parameter in group["params"]] for _, group in groups]


def check_foreign(path: str | os.PathLike[str]) -> None:
    """Raises `BadInput` where no checkpoint of another format can be."""
    if is_url(path):
        raise BadInput(
            f"There is no checkpoint of Terrazzo's '{path}'. Those of other formats are read from local paths only:"
            " copy it to one."
        )
    store, name = store_and_name(path)
    if not store.occupied(name):
        raise BadInput(f"There is no checkpoint '{path}'.")


def _check_path(path: object) -> None:
    """Raises `BadInput` for what has been read already, or is another argument."""
    if not isinstance(path, str | os.PathLike):
        keys = f" with {listed([*map(repr, path)], 8)}" if isinstance(path, Mapping) else ""
        raise BadInput(
            f"The first argument is a {type(path).__name__}{keys}, expected the path of a checkpoint, or of a file of"
            " torch.save: write tz.checkpoint.load(path, model, optimizer), or tz.checkpoint.load_weights(model, path)."
            " A state dict that is in memory goes into the model by model.load_state_dict."
        )


def own_folder(path: str | os.PathLike[str]) -> CheckpointFolder | None:
    """The folder `path` if it is a Terrazzo checkpoint, or what is left of one."""
    store, name = store_and_name(path)
    folder = store.folder(name)
    return folder if any(map(folder.has, (MANIFEST, SEAL, rank_file_name(0)))) else None


def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    cast: bool = False,
) -> dict[str, Any]:
    """Restore a sharded model and its optimizer from the checkpoint `path`; returns its `extra`. Collective.

    World size, plan and format may be any. The random generators are restored when the world size is the one that
    saved. Everything is checked before anything is changed: that it fits, and every byte against its digest.
    Memory: one range at a time beside the state itself. Left out, with a warning on rank 0, are an optimizer's states
    of parameters that are frozen here, and an average (`tz.EMA`), outer momentum or residuals that nothing keeps here.
    Parameters that were tied and are several tensors here each take the one's values, with a warning; such as are tied
    here alone are refused, unless a format that does not know of ties has the same values under all names. An average
    that the checkpoint lacks is refused; momentum and residuals that it lacks begin at zero. What a format of another
    program's has and is not read is named in a warning, too.

    Args:
        optimizer: None takes the weights and leaves the rest; a list where the model has several.
        cast: whether states may be rounded to a narrower dtype. What is beyond its range becomes infinite.

    Raises:
        Damaged: what is there is not what was written; the message names the file, the tensor and the bytes.
        BadInput: the checkpoint does not fit the model or optimizer; of each kind of difference three are named.
        RanksApart: ranks give other arguments.
    """
    groups = own_groups(model)  # before it is known that all ranks give an optimizer, or none
    trained = None if optimizer is None else model
    source = together(lambda: open_source(path, trained, groups), Misuse)
    restore(source, model, optimizer, cast=cast)
    warn_of_notes(source, source.all_notes if optimizer is not None else [*source.notes, *source.file_notes])
    return source.extra


def warn_of_notes(source: Source, notes: Sequence[str]) -> None:
    """Say on rank 0 what is to be known of how a checkpoint was read: of most notes, what is not taken over."""
    if notes and dist.get_rank() == 0:
        warn(f"Of the checkpoint '{source.where}': {printable(listed(notes, 5, ';'))}.")


@labelled(Label(Purpose.CHECKPOINT))
def restore(source: Source, model: torch.nn.Module, optimizer: Optimizers, *, cast: bool = False) -> None:
    """What `load` does with an opened checkpoint, of whose notes the caller warns. Collective."""
    require_alike({"optimizer": presence(optimizer), "cast": str(cast)})
    together(lambda: check_optimizers(model, optimizer), Misuse)
    known = parameter_table(model)
    beside = _readers_of_one(source)
    problems = functools.partial(misfits, source, model, known, optimizer is not None, cast)
    together(lambda: _check_fit(source, [*problems()]), Misuse)
    together(lambda: _check_ties(source, model, known), Misuse)
    together(lambda: _check_generators(source), Misuse)
    together(lambda: _check_bytes(source, optimizer is not None, beside), Misuse)
    all_or_none = functools.partial(together, failed=Misuse)
    ModelState(model).restore(_SourceReader(source, model), optimizer is not None, all_or_none)
    together(lambda: _restore_rest(source, model, known if optimizer is not None else None), Misuse)
    if dist.get_rank() == 0:
        _warn_of_ties(source, known)
        if optimizer is not None:
            _warn_of_what_is_left(source, model, known)


def _readers_of_one(source: Source) -> list[int]:
    """The ranks that read it from the same memory as this one, once it is sure that all have the same. Collective."""
    seen = gather_json([source.identity, source.cache])
    if len({identity for identity, _ in seen}) > 1:
        require_alike({"the checkpoint": f"'{source.where}'"})
        raise Damaged(f"The ranks do not see the same checkpoint '{source.where}': is the file system shared?")
    return [rank for rank, (_, cache) in enumerate(seen) if cache is not None and cache == source.cache]


def _warn_of_ties(source: Source, known: Sequence[TableRow]) -> None:
    if names := untied(source, known):
        warn(
            f"In the checkpoint '{source.where}' {printable(listed(names, 3, ';'))} are one tensor, and here several:"
            " each begins with its values, and is trained by itself. To go on as it was saved, tie them in the model"
            " before tz.shard; in a configuration, model.tie_embeddings=true."
        )


def _warn_of_what_is_left(source: Source, model: torch.nn.Module, known: Sequence[TableRow]) -> None:
    if left := unkept(source, model):
        warn(
            f"The checkpoint '{source.where}' has {' and '.join(left)}, which nothing keeps here: it is not loaded, and"
            " the next save is without it. To go on with it, build the run as it was saved and then load: with"
            " tz.EMA(model), tz.shard(..., diloco=...), or a precision with error_feedback=True, on several ranks."
        )
    if names := unstepped(source, known):
        warn(
            f"The checkpoint '{source.where}' has an optimizer's states of {printable(listed(names))}, which no"
            " optimizer steps here: they are not loaded, and the next save is without them. Parameters that are to be"
            " trained need requires_grad and a place in an optimizer before tz.shard; then load again."
        )


def _check_fit(source: Source, problems: list[str]) -> None:
    if problems:
        text = "; ".join(problems)
        hint = " (adapters differ: keep the settings that they were added with)" if ".lora_" in text else ""
        cast = " cast=True allows rounding; in a configuration, checkpoint.cast=true." if ROUNDED in text else ""
        raise BadInput(
            printable(
                f"The checkpoint '{source.where}' does not fit this run{hint}: {text}.{cast} Build model and optimizer"
                " as they were when it was saved, or begin anew in another folder."
            )
        )


def _check_ties(source: Source, model: torch.nn.Module, known: Sequence[TableRow]) -> None:
    """Of what is tied here alone, compare this rank's share."""
    _check_fit(source, misfits_of_ties(source, model, known, dist.get_rank(), dist.get_world_size()))


def _generators(source: Source) -> dict[str, Any] | None:
    """The saved states of this rank's random generators, where ranks are as many as they were."""
    return source.ranks[dist.get_rank()] if len(source.ranks) == dist.get_world_size() else None


def _check_generators(source: Source) -> None:
    if (saved := _generators(source)) is not None and (problem := rng_problem(saved.get("rng"))) is not None:
        raise Damaged(f"The states of random generators in '{source.where}' cannot be used: {problem}.")


def _check_bytes(source: Source, with_optimizer: bool, beside: Collection[int]) -> None:
    """Check this rank's share; of all ranks together every byte is read once. `beside` read from the same memory."""

    def wanted(kind: str) -> bool:
        return with_optimizer or kind in (WEIGHT, BUFFER)

    source.check(wanted, dist.get_rank(), dist.get_world_size(), beside)


class _SourceReader:
    """States of a checkpoint, as the engine asks for them: a `StateReader`."""

    def __init__(self, source: Source, model: torch.nn.Module) -> None:
        self._source = source
        self._listed = {names[0]: source.resolve(names) for names in parameters_by_names(model)}
        self._parameters = {each.name: each for each in ModelState(model).parameters()}

    def has(self, name: str, kind: str) -> bool:
        name_there = self._listed[name]
        return name_there is not None and kind in self._source.tensors[name_there].states

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        name_there, source, parameter = self._listed[name], self._source, self._parameters[name]
        assert name_there is not None, "a state that is there"
        if start == stop:
            return torch.empty(0, dtype=source.tensors[name_there].states[kind].dtype)
        if parameter.box.is_all or not parameter.per_element(kind):
            return source.read(name_there, kind, start, stop)
        return _read_part(source, name_there, kind, parameter.box.owned(Range(start, stop)), stop - start)


def _read_part(source: Source, name: str, kind: str, parts: Iterable[Owned], numel: int) -> Tensor:
    """What a rank has of a parameter that ranks share: rectangles, from whichever tiles have them."""
    values = torch.empty(numel, dtype=source.tensors[name].states[kind].dtype)
    for part in parts:
        read = [source.read_box(name, kind, each.offsets, each.sizes).reshape(-1) for each in part.rectangles()]
        into = part.of(values[part.inside.start : part.inside.stop])
        into.copy_(torch.cat(read).view(into.shape))
    return values


def _restore_rest(source: Source, model: torch.nn.Module, known: Sequence[TableRow] | None) -> None:
    """Buffers, random generators, and unless `known` is None hyper-parameters."""
    with torch.no_grad():
        for buffer in persistent_buffers(model):
            if (name_there := source.resolve(buffer.names)) is not None:
                kind = BUFFER if BUFFER in source.tensors[name_there].states else WEIGHT
                buffer.tensor.copy_(source.whole(name_there, kind))
    if known is not None:
        _restore_groups(source, model, known)
    if (saved := _generators(source)) is not None:
        restore_rng(saved["rng"])


def _restore_groups(source: Source, model: torch.nn.Module, known: Sequence[TableRow]) -> None:
    saved = source.optimizer
    assert saved is not None
    for group, values in fitted_groups(source, model, known):
        for key, value in values.items():
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:  # JSON has no tuples
                group[key] = tuple(value) if isinstance(current, tuple) else value
    if saved.scaler and (holder := scaler_of(model)) is not None:
        holder.load_scaler_state(_scaler_of_replica(source, model) or saved.scaler)


def _scaler_of_replica(source: Source, model: torch.nn.Module) -> Any:
    """The scaler of this rank's replica, where replicas train by themselves and are as many as they were."""
    axes, own = engine_of(model).axes, _generators(source) or {}
    return own.get("scaler") if axes.replica_axis and own.get("replicas") == axes.size(axes.replica_axis) else None
