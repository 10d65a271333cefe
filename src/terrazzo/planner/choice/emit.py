"""The configuration with which `terrazzo train` runs a setup as it is."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from terrazzo.engine import PRECISIONS, Plan
from terrazzo.errors import BadInput
from terrazzo.nn.chunked_cross_entropy import MANY_LOGITS
from terrazzo.planner.choice.decoder_section import decoder_section
from terrazzo.planner.gate.gate import findings
from terrazzo.planner.model.shapes import BUILT_IN, ModelShape
from terrazzo.planner.setup.choice_names import by_preset
from terrazzo.planner.setup.framework import TERRAZZO
from terrazzo.planner.setup.request import ModelSource
from terrazzo.planner.setup.setup import Setup

__all__ = ["TrainFiles", "train_config"]

TOKENIZER_FILE = "tokenizer.json"
SWAP_FOLDER = Path("runs/default/swap")
"""Where swap files go unless the user says otherwise: in the default log folder, which a run makes itself."""


@dataclass(frozen=True)
class TrainFiles:
    """A train configuration as nested dicts and, of a model that no config.json holds, one for its `model.path`."""

    config: dict[str, Any]
    model_config: dict[str, Any] | None = None


def train_config(setup: Setup, model: ModelSource, model_folder: str | Path = "model") -> TrainFiles:
    """The sections of `terrazzo train` that a setup decides; the others keep their defaults.

    Args:
        model: what the setup's shape was made from.
        model_folder: where the caller will write `model_config` as config.json, if there is one.

    Raises: `BadInput` where this version cannot run the setup, or cannot build the model.
    """
    _check_runnable(setup)
    section, model_config = _model(setup.model, model, str(model_folder))
    train: dict[str, Any] = {"activation_checkpointing": setup.checkpointing_name}
    if setup.compile:
        train["compile"] = True
    config = {
        "model": section,
        "plan": _plan(setup),
        **_parallel(setup),
        **_offload(setup),
        "precision": _precision(setup),
        "batch": {
            "global_batch": setup.global_batch,
            "micro_batch": setup.micro_batch,
            "sequence_length": setup.sequence,
        },
        "optimizer": _optimizer(setup),
        "train": train,
    }
    if setup.adapters is not None:
        config["model"], config["lora"] = {**section, "weights": "pretrained"}, {"rank": setup.adapters}
    if kind := _loss(setup):
        config["objective"] = {"loss": kind}
    if "path" in section and (Path(section["path"]) / TOKENIZER_FILE).is_file():
        config["data"] = {"tokenizer": section["path"]}
    if setup.cluster.nodes == 1:
        config["launch"] = {"ranks": setup.cluster.count}
    return TrainFiles(config, model_config)


def _loss(setup: Setup) -> str:
    """How the loss is computed, where a run would not take it so by itself; else empty.

    Raises: `BadInput` for what no run does on as many ranks along tp.
    """
    if setup.loss == "full" and setup.mesh.tp > 1:
        raise BadInput(
            f"`terrazzo train` takes the loss of each rank's part of the vocabulary where tp is {setup.mesh.tp}, and "
            "puts no logits together. Plan with loss parts, or leave it out."
        )
    if setup.loss == "parts" and setup.mesh.tp == 1:
        raise BadInput("loss parts is of ranks along tp, and tp is 1. Leave it out.")
    if setup.loss == "chunked":
        return "chunked"
    logits = setup.rank_tokens * setup.model.logits // setup.mesh.tp
    return "full" if logits >= MANY_LOGITS else ""


def _check_runnable(setup: Setup) -> None:
    if setup.as_megatron:
        raise BadInput(
            "This is what Megatron-core takes, and `terrazzo train` runs it otherwise. Leave --framework megatron out."
        )
    here = replace(setup, framework=TERRAZZO)
    if blocking := [each for each in findings(here) if each.severity != "warn"]:
        raise BadInput(f"This plan is planned, not runnable yet: {' '.join(map(str, blocking))}")
    if not setup.model.layers:
        raise BadInput(
            f"There is nothing to train in {setup.model.name}. Name a preset, or the folder of a config.json."
        )


def _model(shape: ModelShape, model: ModelSource, folder: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The `model` section, and the config.json to write for it."""
    from terrazzo.planner.model.loading import CONFIG_FILE, preset_name, read_config
    from terrazzo.planner.model.presets import PRESETS

    if shape.family == BUILT_IN:
        return decoder_section(shape, model), None
    if isinstance(model, Mapping):
        return {"kind": "huggingface", "path": folder}, dict(model)
    if isinstance(model, str) and (name := preset_name(model)) is not None:
        return {"kind": "huggingface", "path": folder}, dict(PRESETS[name])
    if isinstance(model, str | Path):
        path = Path(model)
        if path.is_dir() or path.name == CONFIG_FILE:
            return {"kind": "huggingface", "path": str(path if path.is_dir() else path.parent)}, None
        return {"kind": "huggingface", "path": folder}, read_config(path)  # a run reads config.json, which is another
    raise BadInput(
        f"`terrazzo train` cannot build {shape.name} from its shape alone. Save its config.json in a folder and plan "
        "for that folder, or shard it in a loop of your own with tz.shard."
    )


def _plan(setup: Setup) -> dict[str, Any]:
    plan, mesh = setup.plan, setup.mesh
    if _is_preset(plan):
        section: dict[str, Any] = {"name": plan.name}
    else:
        section = {state: str(place) for state, place in plan.places().items()}
    others = {axis: getattr(mesh, axis) for axis in ("pp", "dp_replicate", "cp", "tp", "ep")}
    if math.prod(others.values()) > 1:
        sizes = {axis: size for axis, size in others.items() if size > 1}
        section["mesh"] = {**sizes, "dp_shard": mesh.dp_shard}
    if setup.prefetch != 1:
        section["prefetch"] = setup.prefetch
    return section


def _parallel(setup: Setup) -> dict[str, Any]:
    """How ranks share sequences, matrices and layers, where that is not the default."""
    section: dict[str, Any] = {}
    if setup.mesh.tp > 1 and not setup.sequence_parallel:
        section["tensor"] = {"sequence": False}
    if setup.mesh.cp > 1:
        section["context"] = {"mode": setup.context}
    if setup.mesh.pp > 1:
        section["pipeline"] = {"schedule": setup.pipeline, "chunks": setup.virtual_stages}
    return {"parallel": section} if section else {}


def _is_preset(plan: Plan) -> bool:
    try:
        return Plan.named(plan.name) == plan
    except BadInput:
        return False


def _offload(setup: Setup) -> dict[str, Any]:
    """What a run needs to know beside the plan's tiers: a folder for swap files, and what goes to the host too."""
    section: dict[str, Any] = {}
    if setup.plan.on_disk:
        section["path"] = [str(folder) for folder in setup.offload.folders] or str(SWAP_FOLDER)
    if setup.offload_activations:
        section["activations"] = "cpu"
    return {"offload": section} if section else {}


def _precision(setup: Setup) -> dict[str, Any]:
    """The preset of the section that needs the fewest keys, and these."""
    name, keys = by_preset(setup.precision, PRECISIONS)
    flags = {"true": True, "false": False}
    return {"name": name, **{key: flags.get(word, word) for key, word in keys.items()}, **_linears(setup)}


def _linears(setup: Setup) -> dict[str, str]:
    if setup.matmul != "fp8":
        return {}
    return {"linears": f"fp8-{setup.recipe}"}


def _optimizer(setup: Setup) -> dict[str, Any]:
    options = _kernel(setup) | dict(setup.optimizer.options)
    return {"name": setup.optimizer.torch_class} | ({"options": options} if options else {})


def _kernel(setup: Setup) -> dict[str, bool]:
    """Arguments with which torch's class takes the kernel that was asked for; none where it was not.

    Raises: `BadInput` for one that the class does not have, and does not take by itself.
    """
    asked = setup.optimizer_kernel
    kind = getattr(torch.optim, setup.optimizer.torch_class or "", None)
    known = inspect.signature(kind).parameters if kind else {}
    options = {name: name == asked for name in ("foreach", "fused") if name in known}
    if asked is None or (asked not in options and asked == replace(setup, optimizer_kernel=None).update_kernel):
        return {}
    if asked not in (*options, "loop") or not options:
        raise BadInput(f"optimizer_kernel {asked}: {setup.optimizer.torch_class} has none of that name. Leave it out.")
    return options
