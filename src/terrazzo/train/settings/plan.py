"""Translates a configuration into what `tz.shard` takes beside model and optimizer: plan, offload, precision, mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from terrazzo.config import BatchConfig, Config, MeshConfig, OffloadConfig
from terrazzo.engine import OFFLOADS, PLANS, DiLoCo, Offload, Plan, Precision, WireFormat, formats_without_messages
from terrazzo.engine.mesh.family import DATA_AXES
from terrazzo.errors import BadInput
from terrazzo.messages import counted
from terrazzo.parallel import mesh_sizes
from terrazzo.words import DTYPE_FIELDS

__all__ = [
    "build_diloco",
    "build_offload",
    "build_plan",
    "build_precision",
    "check_rounds",
    "empty_rows",
    "evaluation_limit",
    "filling_note",
    "mesh_shape",
    "micro_batches_per_rank",
    "precision_of_run",
    "scaled_for_sums",
    "unused_formats",
]

OFFLOADED_STATES = ("weight", "grad", "optim")
_ALONE = MeshConfig()


def build_plan(config: Config) -> Plan:
    """The plan by its name or from its four places; raises `BadInput` when it breaks the prefix rule."""
    plan = config.plan
    places = {state: getattr(plan, state) for state in ("weight", "between", "grad", "optim")}
    try:
        built = Plan(**places) if plan.name is None else Plan.named(plan.name)
    except BadInput as error:
        raise BadInput(f"plan{'' if plan.name is None else '.name'}: {error}") from None
    built = _with_tiers(built, config.offload)
    if built.groups and plan.sync_every is not None:
        raise BadInput(
            f"plan {built.name} splits states inside of groups of ranks, and with plan.sync_every {plan.sync_every}"
            " these groups train by themselves: take plan=zero3, which splits over the ranks of one group."
        )
    if built.groups and plan.mesh.dp_replicate == 1:
        raise BadInput(
            f"plan {built.name} splits states inside of groups of ranks, and the groups hold copies of each other, but"
            " this run has one group: set plan.mesh.dp_replicate to the number of groups, such as"
            " plan.mesh.dp_replicate=2, or take a plan that needs none, such as plan=zero3."
        )
    replicated = plan.mesh.dp_replicate != 1 and plan.sync_every is None
    built.resolve(("dp_replicate", "dp_shard") if replicated else ("dp_shard",))
    return built


def build_diloco(config: Config) -> DiLoCo | None:
    """How groups of ranks train by themselves; None if gradients are summed over all groups."""
    if config.plan.sync_every is None:
        return None
    outer = config.plan.outer
    idle = set() if outer.delay else {"mixing"}  # of which a note is given
    try:
        return DiLoCo(config.plan.sync_every, **outer.model_dump(exclude=idle))
    except BadInput as error:
        raise BadInput(str(error).replace("diloco", "plan.outer", 1)) from None


def check_rounds(config: Config, step: int) -> None:
    """Raise `BadInput` if the last step of a run does not end a round: only an outer step makes groups' weights equal.

    Args:
        step: that the run continues from.
    """
    every, steps = config.plan.round_steps, config.train.steps
    if every is None or steps <= step or not (over := (steps - step) % every):
        return
    begun = f", from step {step}" if step else ""
    key = "plan.sync_every" if config.plan.outer.meet_every is None else "plan.outer.meet_every"
    options = [str(number) for number in (steps - over, steps - over + every) if number > step]
    raise BadInput(
        f"{key} {every} does not divide the steps of the run, train.steps {steps}{begun}: the last {over}"
        f" would end without an outer step. Set train.steps={' or '.join(options)}, or another {key}."
    )


def _with_tiers(plan: Plan, offload: OffloadConfig) -> Plan:
    """The plan with the tiers of the section `offload` instead of its own, under a preset's name if it is one."""
    by_state = {state: getattr(offload, state) for state in OFFLOADED_STATES}
    if all(tiers is None for tiers in by_state.values()):
        return plan
    base = plan.base
    moved = plan.on(**by_state, name=f"{base}@custom")
    names = [base, *(f"{base}@{tiers}" for tiers in OFFLOADS)] if base in PLANS else []
    return next((Plan.named(name) for name in names if Plan.named(name).places() == moved.places()), moved)


def build_offload(config: Config) -> Offload:
    """How offloaded states are kept and updated; raises `BadInput` for an update that clipping or scaling rules out.

    Settings without effect under the plan are left out; `idle_notes` names them.
    """
    section = config.offload
    is_scaled = build_precision(config).loss_scaling is not None
    obstacles = [
        (config.train.clip, "clips gradients (train.clip)", "train.clip=null"),
        (is_scaled, "scales the loss (precision)", "another precision"),
        (config.guard.acts, "judges each step before its update (guard)", "no guard"),
        (config.plan.sync_every, "notes the weights that rounds begin with (plan.sync_every)", "no plan.sync_every"),
    ]
    obstacle = next(((what, edit) for is_there, what, edit in obstacles if is_there), None)
    if section.step == "backward" and obstacle:
        what, edit = obstacle
        raise BadInput(
            f"offload.step is 'backward', which updates each unit before the others' gradients exist, but this run"
            f" {what}, which needs all of them first: use offload.step=overlapped, which is exact too, or {edit}."
        )
    step = ("overlapped" if obstacle else "backward") if section.step == "auto" else section.step
    return Offload(
        path=section.path,
        step=step,
        threads=section.threads,
        pin=section.pin,
        direct=section.direct,
        block_mib=section.block_mib,
        depth=section.depth,
        digest=section.digest,
    ).used_under(build_plan(config), activations=section.activations == "cpu")


def build_precision(config: Config) -> Precision:
    """The named precision, with the dtypes that the configuration gives."""
    base = Precision.named(config.precision.name)
    own = {key: getattr(config.precision, key) for key in DTYPE_FIELDS}
    dtypes: dict[str, Any] = {key: own[key] or getattr(base, key) for key in DTYPE_FIELDS}
    further: dict[str, Any] = {key: getattr(config.precision, key) for key in ("rounding", "frozen", "error_feedback")}
    for key, plain in (("gather", "compute"), ("quantized_reduce", "none")):
        value = getattr(config.precision, key)
        further[key] = None if value == plain else WireFormat(value)
    return Precision(**dtypes, loss_scaling=base.loss_scaling, **further)


def precision_of_run(config: Config, world_size: int) -> Precision:
    """`build_precision` without formats of messages that no rank sends; `idle_notes` names them."""
    precision = build_precision(config)
    unused = [name for names in unused_formats(config, world_size).values() for name in names]
    return replace(precision, **{name: getattr(Precision(), name) for name in unused})


def unused_formats(config: Config, world_size: int) -> dict[str, Sequence[str]]:
    """Names of settings of `precision` that have no effect on the mesh of a run, by the reason."""
    sizes = mesh_shape(config.plan.mesh, world_size)
    apart = {"dp_replicate"} if config.plan.sync_every is not None else set()
    data = [axis for axis in DATA_AXES if sizes.get(axis, 1) > 1 and axis not in apart]
    group = math.prod(sizes.get(axis, 1) for axis in ("dp_shard", "cp", "tp"))
    if (experts := sizes.get("ep", 1)) > 1 and group > experts:  # whose copies are split and summed over all of these
        return formats_without_messages(build_plan(config), DATA_AXES)
    return formats_without_messages(build_plan(config).over(data), data)


def scaled_for_sums(precision: Precision, config: Config) -> Precision:
    """The precision with a loss scale for losses that are summed over a step's samples, and not averaged.

    The initial and the smallest loss scale are meant for mean losses: here they are divided by the samples of a step,
    rounded to a power of two.
    """
    if (scaling := precision.loss_scaling) is None:
        return precision
    each = 1 if config.objective.kind.of_pairs else config.batch.sequence_length
    share = 2.0 ** -math.floor(math.log2(config.batch.global_batch * each))
    return replace(precision, loss_scaling=replace(scaling, init=scaling.init * share, minimum=scaling.minimum * share))


def mesh_shape(mesh: MeshConfig, world_size: int) -> dict[str, int]:
    """The axes of the mesh and their sizes, outermost first; raises `BadInput` if these do not multiply to the ranks.

    Axes of one rank are left out, except `dp_shard`, and a `dp_replicate` that follows the number of ranks.
    """
    sizes = {axis: size for axis, size in mesh.model_dump().items() if size != 1 or axis == "dp_shard"}
    if mesh.dp_replicate is None:
        if over := world_size % mesh.fixed:
            numbers = [str(number) for number in (world_size - over, world_size - over + mesh.fixed) if number]
            raise BadInput(
                f"plan.mesh: dp_replicate is null, groups of {counted(mesh.fixed, 'rank')} as the other axes have it,"
                f" and this run has {counted(world_size, 'rank')}: start {' or '.join(numbers)}, or set another"
                " plan.mesh.dp_shard."
            )
        sizes["dp_replicate"] = mesh.groups(world_size)
    try:
        return mesh_sizes(sizes, world_size)
    except BadInput as error:
        raise BadInput(f"plan.mesh: {error}") from None


def micro_batches_per_rank(batch: BatchConfig, world_size: int, mesh: MeshConfig = _ALONE) -> int:
    """Micro-batches per step on each rank, enough for the global batch; the last ones may have empty rows.

    So the same batch is possible if fewer ranks are left than it was configured for.
    """
    return -(-batch.global_batch // _rows_at_once(batch, world_size, mesh))


def empty_rows(batch: BatchConfig, world_size: int, mesh: MeshConfig = _ALONE) -> int:
    """Rows of a step, over all ranks, that only fill up micro-batches and have nothing to learn."""
    return -batch.global_batch % _rows_at_once(batch, world_size, mesh)


def _rows_at_once(batch: BatchConfig, world_size: int, mesh: MeshConfig) -> int:
    return batch.micro_batch * mesh.readers(world_size)


def evaluation_limit(config: Config, readers: int) -> int:
    """The most sequences that an evaluation reads, over all ranks, of which `readers` read different ones."""
    return config.train.eval_batches * config.batch.micro_batch * readers


def filling_note(batch: BatchConfig, world_size: int, mesh: MeshConfig = _ALONE) -> str | None:
    """A line on what empty rows cost, and what to do about them; None if there are none."""
    if not (empty := empty_rows(batch, world_size, mesh)):
        return None
    at_once = _rows_at_once(batch, world_size, mesh)
    rows = batch.global_batch + empty
    options = [str(size) for size in (batch.global_batch // at_once * at_once, rows) if size]
    shared = {axis: size for axis in ("pp", "cp", "tp") if (size := getattr(mesh, axis)) > 1}
    sharing = "".join(f" / plan.mesh.{axis} {size}" for axis, size in shared.items())
    who = f"({world_size} ranks{sharing})" if sharing else f"{world_size} ranks"
    return (
        f"batch: {empty} of {rows} rows of a step are empty, {empty / rows:.0%} of its computing: batch.global_batch"
        f" {batch.global_batch} does not divide by batch.micro_batch {batch.micro_batch} × {who}. What is learnt is the"
        f" same; batch.global_batch={' or '.join(options)}, or another micro_batch, has no empty rows"
    )
