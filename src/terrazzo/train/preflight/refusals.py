"""What a run refuses of its configuration alone, and of its number of ranks: no file, folder or device is looked at.

What is refused of a model is told of the built-in decoder, which needs no file; a folder's is asked by training alone.

`terrazzo config check` asks the same list, so that both give one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from terrazzo.config import Config, setting_texts
from terrazzo.engine import check_narrow, find_units
from terrazzo.errors import BadInput
from terrazzo.parallel.pipeline.schedules import actions_of
from terrazzo.train.data.chat import check_own_template
from terrazzo.train.data.load import check_too_long
from terrazzo.train.data.sources import without_records
from terrazzo.train.data.tokenizer import BYTES
from terrazzo.train.model.prepare import ModelOnPaper
from terrazzo.train.preflight.axis_sizes import check_sizes
from terrazzo.train.preflight.shared_axes import check_axes
from terrazzo.train.settings.optimizer import check_names, check_settings, optimizer_class
from terrazzo.train.settings.plan import (
    build_diloco,
    build_offload,
    build_plan,
    build_precision,
    check_rounds,
    empty_rows,
    mesh_shape,
    micro_batches_per_rank,
)
from terrazzo.words import FILL_IN

__all__ = ["check_samples_of_groups", "refusals", "refusals_of_model", "refusals_of_ranks"]


def refusals(
    config: Config, world_size: int | None = None, whole: ModelOnPaper | None = None
) -> Iterator[tuple[str, BadInput]]:
    """Each refusal, behind the section or key that it is of; what follows from one before it is left out.

    The built-in decoder, which needs no file, is asked for what the configuration names of it.

    Args:
        world_size: the number of ranks; None: it is not known, and what depends on it is not asked.
        whole: the configuration's model; None: a decoder is made for as many tokens as a tokenizer may have.
    """
    if left := [key for key, text in setting_texts(config).items() if text == f'"{FILL_IN}"']:
        yield left[0], _not_filled_in(left)
    told: set[str] = set()
    yield from _refused(_CHECKS, told, config)
    if world_size is not None:
        yield from refusals_of_ranks(config, world_size)
    yield from _refused(_CHECKS_OF_AXES, told, config)
    if config.model.kind == "decoder":
        yield from _refused(_CHECKS_OF_MODEL, told, config, whole or ModelOnPaper(_with_tokens(config)))


def refusals_of_ranks(config: Config, world_size: int) -> Iterator[tuple[str, BadInput]]:
    """Those of them that depend on the number of ranks."""
    try:
        mesh_shape(config.plan.mesh, world_size)
    except BadInput as error:  # without a mesh nothing can be counted
        yield "plan.mesh", error
    else:
        yield from _refused(_CHECKS_OF_RANKS, set(), config, world_size)


def refusals_of_model(config: Config, whole: ModelOnPaper) -> Iterator[tuple[str, BadInput]]:
    """Those of them that the model decides: names that it does not have, and parts that it cannot be cut into."""
    yield from _refused(_CHECKS_OF_MODEL, set(), config, whole)


def _refused(
    checks: Mapping[str, Callable[..., object]], told: set[str], *arguments: Any
) -> Iterator[tuple[str, BadInput]]:
    """What some checks refuse, and `told` has not."""
    for key, check in checks.items():
        try:
            check(*arguments)
        except BadInput as error:
            if str(error) not in told:
                told.add(str(error))
                yield key, error


def _not_filled_in(left: list[str]) -> BadInput:
    """The refusal of placeholders that a generated configuration leaves to its user."""
    return BadInput(
        f"{' and '.join(left)} {'are' if len(left) > 1 else 'is'} still {FILL_IN}. Name them in the file, or behind"
        f" it: {' '.join(f'{key}=...' for key in left)}."
    )


# -- of the configuration alone ------------------------------------------------------------------------------------


def _check_guard(config: Config) -> None:
    """Raise `BadInput` for `guard.memory_every` where it would see nothing."""
    optim = build_plan(config).optim
    if config.guard.memory_every is not None and set(optim.shares) != {"device"}:
        raise BadInput(
            f"guard.memory_every is {config.guard.memory_every}, and offload.optim '{optim.tier}': states away from the"
            " device are not looked at. Set guard.memory_every=null and, for drives, offload.digest=true."
        )


def _check_moments(config: Config) -> None:
    """Raise `BadInput` for moments in 8 bits that the optimizer does not have."""
    check_narrow([optimizer_class(config.optimizer)], build_precision(config))


def _check_dropped(config: Config) -> None:
    """Raise `BadInput` where documents are to be dropped, and it is clear without the data that none would be."""
    data = config.data
    if not config.objective.kind.of_pairs and (data.packing == "stream" or without_records(data)):
        check_too_long(data, data.packing or "stream")


_CHECKS: dict[str, Callable[[Config], object]] = {
    "plan.outer": build_diloco,
    "plan.sync_every": lambda config: check_rounds(config, 0),
    "plan": build_plan,
    "precision": build_precision,
    "offload.step": build_offload,
    "guard.memory_every": _check_guard,
    "optimizer": lambda config: check_settings(config.optimizer),
    "precision.moments": _check_moments,
    "data.too_long": _check_dropped,
    "data.chat_template": lambda config: check_own_template(config.data.tokenizer, config.data.chat_template),
}
_CHECKS_OF_AXES: dict[str, Callable[[Config], object]] = {
    "plan.mesh": check_sizes,
}


# -- of the number of ranks ----------------------------------------------------------------------------------------


def check_samples_of_groups(config: Config, world_size: int) -> None:
    """Raise `BadInput` if a group would have no sample in any step, whose weights would count in the mean."""
    if config.plan.sync_every is None:
        return
    batch, mesh = config.batch, config.plan.mesh
    groups, rows = mesh.groups(world_size), batch.global_batch + empty_rows(batch, world_size, mesh)
    if idle := groups - -(-batch.global_batch * groups // rows):
        raise BadInput(
            f"batch.global_batch {batch.global_batch} is {rows // groups} samples for each of the first groups, and"
            f" leaves none to {idle} of the {groups} groups that train by themselves (plan.sync_every): set"
            f" batch.global_batch={rows}, or start fewer groups (plan.mesh.dp_replicate)."
        )


def _check_turns(config: Config, world_size: int) -> None:
    """Raise `BadInput` if a step has too few micro-batches for the stages of a pipeline, or they do not go round."""
    mesh, pipeline = config.plan.mesh, config.parallel.pipeline
    if mesh.pp > 1:
        micro_batches = micro_batches_per_rank(config.batch, world_size, mesh)
        actions_of(pipeline.schedule, mesh.pp, pipeline.chunks, micro_batches)


_CHECKS_OF_RANKS: dict[str, Callable[[Config, int], object]] = {
    "plan.sync_every": check_samples_of_groups,
    "parallel.pipeline": _check_turns,
}


# -- of the model on paper, which is built only if something of it is named ------------------------------------------


def _with_tokens(config: Config) -> Config:
    """A decoder's configuration that needs no tokenizer's file: no name or layer depends on its tokens."""
    if config.model.vocab_size is not None or config.data.tokenizer == BYTES:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": _SOME_TOKENS})})


_SOME_TOKENS = 2**17


def _check_units(config: Config, whole: ModelOnPaper) -> None:
    if config.plan.units:
        find_units(whole.model, config.plan.units, named="plan.units")


def _check_fragments(config: Config, whole: ModelOnPaper) -> None:
    fragments = config.plan.outer.fragments
    if config.plan.sync_every is None or fragments == 1:
        return
    named, _ = find_units(whole.model, config.plan.units, named="plan.units")
    if fragments > (units := 1 + len(named)):  # with the root
        raise BadInput(
            f"plan.outer.fragments is {fragments}; they are sets of units, of which this model has {units}: set"
            f" plan.outer.fragments={units} or fewer."
        )


def _check_optimizer(config: Config, whole: ModelOnPaper) -> None:
    muon = config.optimizer.muon
    if config.optimizer.no_decay or muon.matrices or muon.others:
        check_names(config.optimizer, [name for name, _ in whole.model.named_parameters()])


_CHECKS_OF_MODEL: dict[str, Callable[[Config, ModelOnPaper], object]] = {
    "plan.mesh": check_axes,
    "plan.units": _check_units,
    "plan.outer": _check_fragments,
    "optimizer": _check_optimizer,
    # Building the model looks up names, or refuses it.
    "precision.linears": lambda config, whole: config.precision.recipe and whole.model,
    "objective.loss": lambda config, whole: config.objective.loss == "chunked" and whole.model,
    "train.activation_checkpointing_ops": lambda config, whole: (
        config.train.activation_checkpointing_ops and whole.model
    ),
}
