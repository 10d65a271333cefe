"""Cuts a model into stages: the modules that its values go through one after the other, and where each stage begins.

Everything is read and checked before the model is changed. Modules of other ranks stay in it, without parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from terrazzo.engine import STAGES_OF, give_up
from terrazzo.engine.consensus.equal_values import synchronize
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.partition.unit_members import parameters_by_names
from terrazzo.engine.sharding.shared_parts_checks import check_uncompiled, check_uncut
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean, listed
from terrazzo.name_globs import level_hint
from terrazzo.parallel.pipeline.model_line import own_line, own_tied
from terrazzo.parallel.pipeline.pipeline_stages import PipelineStages
from terrazzo.parallel.pipeline.schedules import balanced
from terrazzo.parallel.pipeline.stage_forward import put_in_line
from terrazzo.parallel.tensor.read_plan import matching
from terrazzo.words import check_schedule

__all__ = ["Pipeline", "check_line", "read_stages", "take_stages"]


@dataclass(frozen=True)
class Pipeline:
    """How ranks along `pp` share the layers of a model.

    Args:
        schedule: `1f1b`, where a rank keeps activations of as many micro-batches as there are stages behind it and one
            more; `gpipe`, all forwards before all backwards; or `zero_bubble`, which puts off the gradients of linear
            maps' weights to when a rank would wait, and keeps as many micro-batches' activations as there are stages.
        chunks: stages of each rank; several make `1f1b` the interleaved schedule, with less waiting and more sending.
        split: names of the modules of the line with which the second stage and those after it begin; by default stages
            are balanced by the elements of their matrices.
        line: names of the modules through which the model's values go one after the other, or globs over them, a
            `*` for one level. Each takes what the one before returns as its first argument, and returns one tensor. By
            default what the model's `pipeline_line()` returns, the modules of an `nn.Sequential`, or the
            `base_model_pp_plan` of transformers.
        tied: names of parameters of the line that the model itself reads behind its last module, such as those of an
            embedding that is the head too: the last stage has them as well. What two modules of the line share need
            not be named. By default what the model's `pipeline_tied()` returns, or none.

    Stages that share a parameter each have a copy of it, with states of its own; its gradients are summed over them
    at the end of a step, so that the copies stay equal to the bit. Norms count it once, and checkpoints hold it once.
    """

    schedule: str = "1f1b"
    chunks: int = 1
    split: Sequence[str] | None = None
    line: Sequence[str] | None = None
    tied: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_schedule(self.schedule, self.chunks)
        for name in ("split", "line", "tied"):
            if isinstance(given := getattr(self, name), str):
                raise BadInput(f"tz.Pipeline({name}={given!r}) is one string: give a list of names, [{given!r}].")


def read_stages(model: nn.Module, axes: Axes, pipeline: Pipeline) -> PipelineStages:
    """The stages of `model`, and which of them this rank has. The model stays as it is.

    Raises:
        BadInput: the model cannot be cut into these stages.
    """
    rank, ranks = axes.coordinates(axes.stage_axis)[0]
    check_uncut(model)
    check_uncompiled(model)
    names = _names_of(model, pipeline)
    _check_line(model, names)
    bounds = _bounds_of(model, names, pipeline, ranks * pipeline.chunks)
    tied = _tied_of(model, pipeline)
    chunks = [names[begin:end] for begin, end in bounds[rank::ranks]]
    if rank == ranks - 1:
        chunks[-1] += tied
    return PipelineStages(ranks, rank, tuple(chunks), names, bounds, pipeline.schedule, tied)


def take_stages(model: nn.Module, axes: Axes, stages: PipelineStages) -> None:
    """Have `model` run this rank's stages alone, in place. Collective over all ranks."""
    synchronize([each for each in model.parameters() if not each.is_meta], axes, axes.within_replica)
    modules = [model.get_submodule(name) for name in stages.line]
    away_for: dict[nn.Parameter, nn.Parameter | None] = {}
    for names, parameter in parameters_by_names(model).items():
        if stages.rank in stages.holders(names):
            away_for[parameter] = None
    for name, module in zip(stages.line, modules, strict=True):
        for path, inner in () if stages.chunks_of(name) else module.named_modules(prefix=name):
            give_up(inner, path, away_for)
    put_in_line(model, modules, stages)
    STAGES_OF.leave(model, stages)


def check_line(model: nn.Module, stages: int) -> None:
    """Refuse a model that cannot be cut into so many stages, balanced.

    Raises:
        BadInput: there.
    """
    names = _names_of(model, Pipeline())
    _check_line(model, names)
    _bounds_of(model, names, Pipeline(), stages)


def _names_of(model: nn.Module, pipeline: Pipeline) -> tuple[str, ...]:
    """The modules of the line, in their order."""
    globs = own_line(model) if pipeline.line is None else pipeline.line
    if globs is None:
        raise BadInput(
            f"Nothing says how values go through a {type(model).__name__}: give the modules that it calls one after "
            "the other, as in tz.Pipeline(line=['embedding', 'layers.*', 'norm', 'head']), or the model a method "
            "pipeline_line() that returns them."
        )
    names = [name for glob in globs for name in _matching(model, glob)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"tz.Pipeline(line=...) has {listed(twice)} twice: name each module once, as forward calls it.")
    inside = [(a, b) for a, b in itertools.permutations(names, 2) if b.startswith(f"{a}.")]
    if inside:
        outer, inner = inside[0]
        raise BadInput(f"tz.Pipeline(line=...) has {outer!r} and {inner!r} inside of it: name one of the two.")
    return tuple(names)


def _tied_of(model: nn.Module, pipeline: Pipeline) -> tuple[str, ...]:
    """The parameters that the model reads behind its line."""
    tied = own_tied(model) if pipeline.tied is None else pipeline.tied
    known = dict(model.named_parameters(remove_duplicate=False))
    if unknown := [name for name in tied if name not in known]:
        raise BadInput(
            f"tz.Pipeline(tied=...): {type(model).__name__} has no parameter {unknown[0]!r}."
            f"{did_you_mean(str(unknown[0]), known)} Give names of model.named_parameters()."
        )
    return tuple(tied)


def _matching(model: nn.Module, glob: str) -> list[str]:
    if not (names := matching(model, glob)):
        hint = level_hint((name for name, _ in model.named_modules()), glob)
        raise BadInput(
            f"tz.Pipeline(line=...): {glob!r} matches no module of {type(model).__name__}, whose children are "
            f"{', '.join(name for name, _ in model.named_children())}.{hint}"
        )
    return names


def _check_line(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse parameters that no stage would have, and buffers that several would have.

    Raises:
        BadInput: there.
    """
    stage_of: dict[Tensor, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        within = next((name for name in names if path == name or path.startswith(f"{name}.")), None)
        for attribute, buffer in module.named_buffers(recurse=False):
            if within is None or attribute in module._non_persistent_buffers_set:
                continue
            if stage_of.setdefault(buffer, within) != within:
                raise BadInput(
                    f"{stage_of[buffer]!r} and {within!r} share a buffer that is saved ({attribute}), and ranks of two "
                    "stages would each update their own. Give each module its own."
                )
        for attribute, _ in module.named_parameters(recurse=False):
            if within is None:
                raise BadInput(
                    f"'{f'{path}.' if path else ''}{attribute}' is in no module of the pipeline's line, so each rank "
                    "would train it by itself. Put it into a module of the line."
                )


def _bounds_of(model: nn.Module, names: Sequence[str], pipeline: Pipeline, stages: int) -> tuple[tuple[int, int], ...]:
    """The half-open interval of modules of each stage.

    Raises:
        BadInput: where one would have no parameter to train.
    """
    if pipeline.split is not None:
        begins = _begins(names, pipeline.split, stages)
    else:
        begins = balanced([_cost(model.get_submodule(name)) for name in names], stages)
    bounds = tuple(itertools.pairwise([*begins, len(names)]))
    trained = [any(p.requires_grad for p in model.get_submodule(name).parameters()) for name in names]
    for number, (begin, end) in enumerate(bounds):
        if not any(trained[begin:end]):
            raise BadInput(
                f"Stage {number + 1} of {stages} ({', '.join(names[begin:end]) or 'no module'}) has no parameter to "
                "train: each needs one, from which on gradients come back. Take fewer ranks along pp or chunks, or "
                "give tz.Pipeline(split=[...]) another cut."
            )
    return bounds


def _begins(names: Sequence[str], split: Sequence[str], stages: int) -> list[int]:
    if len(split) != stages - 1 or not all(name in names for name in split):
        raise BadInput(
            f"tz.Pipeline(split={list(split)!r}) must name the modules with which stages 2 to {stages} begin, "
            f"{stages - 1} of {', '.join(names)}."
        )
    begins = [0, *(names.index(name) for name in split)]
    if begins != sorted(set(begins)):
        raise BadInput(f"tz.Pipeline(split={list(split)!r}) is not in the order of the line: {', '.join(names)}.")
    return begins


def _cost(module: nn.Module) -> int:
    """Elements of matrices that values are multiplied with: what forward and backward take, up to a factor."""
    return sum(
        parameter.numel()
        for inner in module.modules()
        if not isinstance(inner, nn.Embedding | nn.EmbeddingBag)
        for parameter in inner.parameters(recurse=False)
        if parameter.dim() > 1
    )
