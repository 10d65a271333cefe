"""DeepSpeed's JSON, read by its dialect: what the engine is told, and what there is to say about the rest."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from terrazzo.config.files import Loaded, load
from terrazzo.dialects.core.agreement import extras_by_key
from terrazzo.dialects.core.description import Description, Setting
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.formats.deepspeed.keys import TABLE
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.check import check
from terrazzo.dialects.verbs.understand import Understood, read_document
from terrazzo.errors import BadInput
from terrazzo.integrations.shared.engine_setup import EngineSetup
from terrazzo.integrations.shared.from_description import setup_for

__all__ = ["Configuration", "read"]

_OWN = (
    "bf16.check_grad_overflow",
    "dataloader_drop_last",
    "fp16.auto_cast",
    "optimizer.params.torch_adam",
    "steps_per_print",
    "zero_optimization.compute_grad_norm",
    "zero_optimization.load_from_fp32_weights",
)
"""Keys without a neutral meaning that this integration honours, or that have their effect here anyway."""
_BUILT_HERE = ("optimizer.", "scheduler.")
"""Sections from which this integration builds objects by itself, whatever the neutral description makes of them."""
_UNMANAGED = (
    "managed_gradient_accumulation is false, so that reduction waits for step(). Terrazzo reduces in the last "
    "micro-batch's backward, and has to know which one it is: remove the key, and say "
    "engine.set_gradient_accumulation_boundary(...) before each backward."
)
_OFFLOADED_ACTIVATIONS = "activation_checkpointing.offload"


@dataclass(frozen=True)
class Configuration:
    """A JSON, understood.

    Attributes:
        document: as it was given.
        description: what it means.
        setup: for the engine.
        micro_batch: sequences per forward pass on one rank.
        notes: what is lost or has no effect, a line each.
    """

    document: Mapping[str, Any]
    description: Description
    setup: EngineSetup
    micro_batch: int
    notes: tuple[str, ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key of the document."""
        value: Any = self.document
        for name in key.split("."):
            if not isinstance(value, Mapping) or value.get(name) is None:
                return default
            value = value[name]
        return value

    @property
    def gathers_on_save(self) -> bool:
        """Whether `save_16bit_model` saves: at stage 3 it has to be asked for."""
        return self.stage < 3 or bool(self.description.value("saving.export") == "full")

    @property
    def stage(self) -> int:
        """DeepSpeed's number for the plan."""
        stage = self.get("zero_optimization", 0)
        return int(stage) if isinstance(stage, bool) else int(self.get("zero_optimization.stage", 0))


def read(config: str | os.PathLike[str] | Mapping[str, Any], world: int, device: torch.device) -> Configuration:
    """Read a file or a mapping.

    Raises: `BadInput` listing every key that is refused, each with why.
    """
    loaded = _loaded(config)
    source, context = dialect("deepspeed"), ReadingContext(world=world, folder=loaded.path.parent)
    reading = read_document(source, loaded.document, context)
    findings = check(Understood(loaded, source, reading, context))
    errors = [f"{each.key}: {each.text}" if each.key else each.text for each in findings if each.level == "error"]
    if loaded.document.get("managed_gradient_accumulation") in (False, "false", "False"):
        errors.append(_UNMANAGED)
    errors += _open(reading.description)
    if errors:
        reasons = "; ".join(each.rstrip(".") for each in errors)
        raise BadInput(f"'{loaded.path}' cannot be honoured: {reasons}{'' if reasons.endswith('?') else '.'}")
    description, notes = _without_activations(reading.description)
    renamed = {verdict.key for verdict in reading.verdicts if verdict.kind == "renamed"}
    warnings = [each for each in findings if each.level == "warning" and each.key not in renamed]
    notes += [f"{each.key}: {each.text}" for each in warnings if each.key]  # without one: the file has comments
    notes += _lost(description)
    micro_batch = description.value("batch.micro_batch")
    setup = setup_for(description, device)
    return Configuration(loaded.document, description, setup, micro_batch, tuple(dict.fromkeys(notes)))


def _loaded(config: str | os.PathLike[str] | Mapping[str, Any]) -> Loaded:
    if isinstance(config, Mapping):
        return Loaded(Path("the config dict"), copy.deepcopy(dict(config)), "", "json")
    if not isinstance(config, str | os.PathLike):
        raise BadInput(f"config is a {type(config).__name__}; pass the path of a JSON file, or a dict.")
    return load(Path(config))


def _open(description: Description) -> Iterator[str]:
    """Keys that say "auto" and stay open: only Hugging Face's libraries fill them in."""
    keys = [setting.key for _, setting in description.items() if setting.origin == "auto" and setting.value is None]
    for key in dict.fromkeys(keys):
        yield f"{key} is 'auto', which Hugging Face's libraries fill in, and DeepSpeed does not: put a value"


def _without_activations(description: Description) -> tuple[Description, list[str]]:
    if not description.value(_OFFLOADED_ACTIVATIONS):
        return description, []
    key = description[_OFFLOADED_ACTIVATIONS].key
    changed = description.replace({_OFFLOADED_ACTIVATIONS: Setting(False, "derived", key)})
    return changed, [f"{key}: it is for deepspeed.checkpointing, which this integration has not"]


def _lost(description: Description) -> list[str]:
    """What the document says beyond what the engine is told."""
    extras = [each for key, each in extras_by_key(description).items() if key not in _OWN and _asks(key, each.value)]
    lossy = [f"{each.key}: Terrazzo has no such setting: {each.why}" for each in extras if each.loss != "harmless"]
    harmless = [each.key for each in extras if each.loss == "harmless" and not each.key.startswith(_BUILT_HERE)]
    if harmless:
        lossy.append(f"without effect here, and on the results: {', '.join(harmless)}")
    return lossy


def _asks(key: str, value: object) -> bool:
    """Whether a key says something else than its default."""
    row = TABLE.get(key)
    return value not in (None, {}) and (row is None or value != row.default)
