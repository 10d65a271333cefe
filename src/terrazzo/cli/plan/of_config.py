"""What `terrazzo plan CONFIG` does: plan a configuration of `terrazzo train` as it is."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from terrazzo.config import Config, MeshConfig, PlanConfig
from terrazzo.errors import BadInput, TerrazzoError, printable
from terrazzo.planner import Cluster, Estimate, Request, Setup
from terrazzo.planner.machine.devices import this_machine
from terrazzo.planner.report.answer import Answer
from terrazzo.planner.setup.request import build_cluster
from terrazzo.train.calibration.calibrate import calibrate
from terrazzo.train.launch.machine import ranks_to_start
from terrazzo.train.promise.planned import planned

__all__ = ["of_config"]

OptionValues = Mapping[str, Any]
"""Arguments of `terrazzo plan` by name."""


def of_config(config: Config, asked: OptionValues, machines: Request) -> Answer:
    """What `terrazzo train` promises of `config`, here or on other machines.

    Args:
        machines: its fields that describe machines are what was said of them; the rest is not looked at.
    """
    notes = [_calibrated(asked["config"], asked["overrides"] or [])] if asked["calibrate"] else []
    ranks, cluster = _ranks(asked, config), _cluster(machines)

    def under(setup: Setup) -> Estimate:
        mesh = MeshConfig(**{axis: getattr(setup.mesh, axis) for axis in MeshConfig.model_fields})
        plan = PlanConfig(name=setup.plan.name, mesh=mesh, units=config.plan.units, prefetch=config.plan.prefetch)
        return planned(config.model_copy(update={"plan": plan}), ranks, cluster)

    found = planned(config, ranks, cluster)
    return Answer(replace(found, notes=(*found.notes, *notes)), under)


def _calibrated(path: Path, overrides: list[str]) -> str:
    try:
        record, where = calibrate(path, overrides)
    except BadInput:
        raise
    except TerrazzoError as error:  # the steps failed, and the message holds their traceback
        print(f"Error: {printable(str(error))}", file=sys.stderr)
        raise typer.Exit(1) from None
    return f"{record.steps} steps were measured just now; the record is {where}"


def _ranks(asked: OptionValues, config: Config) -> int:
    if asked["gpus"] is not None:
        return _whole("--gpus", asked["gpus"])
    if asked["gpu"] is not None and config.launch.ranks is None:
        raise BadInput("The configuration does not say how many ranks there are (launch.ranks): give --gpus N.")
    return ranks_to_start(config) if asked["gpu"] is None else config.rank_numbers[-1]


def _cluster(request: Request) -> Cluster | None:
    """The machines that were named, or this one with what was said of it; None where nothing was."""
    if request == Request(request.model, request.gpus):
        return None
    if request.gpu is not None:
        return build_cluster(request)
    here = this_machine()
    host = request.host_memory_bytes or here.host_memory_bytes
    return build_cluster(replace(request, gpu=here.device, host_memory_bytes=host))


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text) or not int(text):
        raise BadInput(f"{name} is '{text}'; beside a configuration it is one whole number above 0.")
    return int(text)
