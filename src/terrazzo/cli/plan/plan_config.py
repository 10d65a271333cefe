"""The answer of `terrazzo plan CONFIG`: plans a configuration of `terrazzo train` as it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from terrazzo.cli.plan.options import PlanArguments
from terrazzo.cli.plan.sources import FromConfig
from terrazzo.cli.shared.arguments import whole_number
from terrazzo.config import Config, MeshConfig, load_config
from terrazzo.errors import BadInput
from terrazzo.launch.machine import ranks_to_start
from terrazzo.planner import Cluster, Edit, Estimate, Request, Setup
from terrazzo.planner.choice.edits import Changed, Kinds, best_edits
from terrazzo.planner.choice.request_changes import narrower_names, parted_axes
from terrazzo.planner.machine.devices import this_machine
from terrazzo.planner.report.answer import Answer
from terrazzo.planner.setup.build_setup import build_cluster
from terrazzo.planner.setup.choice_names import LINEARS
from terrazzo.train.calibration.calibrate import calibrate
from terrazzo.train.planning.run_estimate import estimate_run
from terrazzo.train.settings.plan import check_rounds

__all__ = ["plan_config"]


def plan_config(source: FromConfig, arguments: PlanArguments, machines: Request) -> Answer:
    """What `terrazzo train` would promise for a configuration, here or on other machines.

    Args:
        machines: the machines that the options describe; its other fields are ignored.

    Raises:
        BadInput: as of `estimate_run`, and for steps that do not end a round, as training does.
    """
    config = source.config
    check_rounds(config, 0)
    notes = [_calibrated(source)] if arguments.calibrate else []
    ranks, cluster = _ranks(arguments, config), _cluster(machines)

    def under(setup: Setup) -> Estimate:
        mesh = MeshConfig(**{axis: getattr(setup.mesh, axis) for axis in MeshConfig.model_fields})
        places = dict.fromkeys(setup.plan.places())
        plan = config.plan.model_copy(update={**places, "name": setup.plan.name, "mesh": mesh})
        return estimate_run(config.model_copy(update={"plan": plan}), ranks, cluster)

    estimate = estimate_run(config, ranks, cluster)
    edits: tuple[Edit, ...] = ()
    if estimate.memory.fits is False:

        def edited(change: ChangedSettings) -> Estimate:
            changed = load_config(source.path, [*source.overrides, *change.overrides])
            return estimate_run(changed, change.ranks, cluster, one_of_many=True)

        edits = best_edits(_kinds(config, estimate.setup, ranks), estimate, edited)
    return Answer(replace(estimate, edits=edits, notes=(*estimate.notes, *notes)), under)


class ChangedSettings(NamedTuple):
    """Changes to try: settings that override the configuration, and a number of ranks."""

    overrides: tuple[str, ...]
    ranks: int


def _kinds(config: Config, setup: Setup, ranks: int) -> Kinds[ChangedSettings]:
    """Changes that may save memory, as overrides on the command line."""

    def settings(*overrides: str) -> Changed[ChangedSettings]:
        return Changed(" ".join(overrides), ChangedSettings(overrides, ranks))

    mode, every = config.train.checkpointing
    more = {"none": ("selective", "full"), "full": ("full",) if every > 1 else ()}.get(mode, ("full",))
    modes = [f"train.activation_checkpointing={each}" for each in more]
    batch = config.batch.micro_batch
    sizes = [f"batch.micro_batch={batch >> shift}" for shift in range(1, batch.bit_length())]
    name = "" if "@" in setup.plan.name or setup.cluster.device.kind == "cpu" else setup.plan.name
    tiers = [f"plan={name}@{tier}" for tier in ("cpu", "cpu-all")] if name else []
    loss = ["objective.loss=chunked"] if setup.loss == "full" else []
    rounded = (
        [f"precision.{key}={value}" for key, value in _precision_keys(text).items()] for text in narrower_names(setup)
    )
    parts = [[f"plan.mesh.{axis}={size}" for axis, size in axes.items()] for axes in parted_axes(setup)]
    counts = [ranks << power for power in range(1, 6)]
    return Kinds(
        [map(settings, each) for each in (modes, sizes, loss, tiers)],
        [
            (settings(*both) for both in product(modes[-1:], sizes)),
            (settings(*modes[-1:], *axes) for axes in parts),
        ],
        (settings(*each) for each in rounded),
        (Changed(f"--gpus {count}", ChangedSettings((), count)) for count in counts),
    )


def _precision_keys(text: str) -> dict[str, str]:
    """The keys of the section `precision` that a name such as `bf16,moments=int8` stands for. In what linear layers
    multiply is of the name here, and a key that the configuration has already.
    """
    name, *keys = text.split(",")
    return {"name": "bf16" if name in LINEARS.values() else name, **dict(key.split("=") for key in keys)}


def _calibrated(source: FromConfig) -> str:
    record, where = calibrate(source.path, source.overrides)
    return f"{record.steps} steps were measured just now; the record is {where}"


def _ranks(arguments: PlanArguments, config: Config) -> int:
    if arguments.gpus is not None:
        return whole_number("--gpus beside a configuration", arguments.gpus)
    if arguments.gpu is not None and config.launch.ranks is None:
        raise BadInput("The configuration does not say how many ranks there are (launch.ranks): give --gpus N.")
    return ranks_to_start(config) if arguments.gpu is None else config.rank_numbers[-1]


def _cluster(request: Request) -> Cluster | None:
    """The machines that the options describe, or this machine with what they change; None without such options. CPUs
    are a whole host, as for `setup_of`.
    """
    if request == Request(request.model, request.gpus):
        return None
    if request.gpu is not None:
        return build_cluster(request, 1)
    here = this_machine()
    host = request.host_memory_bytes or here.host_memory_bytes
    return build_cluster(replace(request, gpu=here.device, host_memory_bytes=host), 1)
