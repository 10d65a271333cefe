"""DeepSpeed's JSON, read by its dialect: what the engine is told, and what there is to say about the rest."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from terrazzo.dialects.core.agreement import extras_by_key
from terrazzo.dialects.core.description import Description, Setting
from terrazzo.dialects.core.dialect import Reading, ReadingContext
from terrazzo.dialects.formats.deepspeed.auto import AUTO, LITERAL
from terrazzo.dialects.formats.deepspeed.keys import STRICT, TABLE
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.check import check
from terrazzo.dialects.verbs.understand import Understood, read_document
from terrazzo.documents import Loaded, load
from terrazzo.documents.dotted_keys import split
from terrazzo.errors import BadInput
from terrazzo.integrations.shared.engine_setup import EngineSetup
from terrazzo.integrations.shared.from_description import setup_for
from terrazzo.integrations.shared.honour import lost, refuse, unknown_here

__all__ = ["Configuration", "read"]

_OWN = (
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
        values: what the document says, by DeepSpeed's own dotted keys: see `Reading.values`.
        description: what it means.
        setup: for the engine.
        micro_batch: sequences per forward pass on one rank.
        notes: what is lost or has no effect, a line each.
    """

    values: Mapping[str, Any]
    description: Description
    setup: EngineSetup
    micro_batch: int
    notes: tuple[str, ...] = ()

    def get(self, key: str) -> Any:
        """The value at a dotted key, under any of its spellings; DeepSpeed's default where the document says none."""
        value = self.values.get(key)
        return TABLE[key].neutral if value is None else value

    def section(self, name: str) -> dict[str, Any]:
        """What the document says right below a dotted key, by the keys' last parts."""
        below = {key: value for key, value in self.values.items() if key.startswith(f"{name}.") and value is not None}
        return {split(key)[-1]: value for key, value in below.items()}

    @property
    def gathers_on_save(self) -> bool:
        """Whether `save_16bit_model` saves: at stage 3 it has to be asked for."""
        return self.stage < 3 or bool(self.description.value("saving.export") == "full")

    @property
    def stage(self) -> int:
        """DeepSpeed's number for the plan."""
        older = self.values.get("zero_optimization")  # true means 1
        return int(older if isinstance(older, bool) else self.get("zero_optimization.stage"))


def read(config: str | os.PathLike[str] | Mapping[str, Any], world: int, device: torch.device) -> Configuration:
    """Read a file or a mapping.

    Raises: `BadInput` listing every key that is refused, each with why.
    """
    loaded = _loaded(config)
    source, context = dialect("deepspeed"), ReadingContext(world=world, folder=loaded.path.parent)
    reading = read_document(source, loaded.document, context)
    findings = check(Understood(loaded, source, reading, context))
    errors = [f"{each.key}: {each.text}" if each.key else each.text for each in findings if each.level == "error"]
    if reading.values.get("managed_gradient_accumulation") is False:
        errors.append(_UNMANAGED)
    refused = [verdict.key for verdict in reading.verdicts if verdict.kind == "refused"]
    errors += [*_open(reading), *unknown_here(reading.description, refused)]
    refuse(f"'{loaded.path}'", errors)
    description, notes = _without_activations(reading.description)
    renamed = {verdict.key for verdict in reading.verdicts if verdict.kind == "renamed"}
    warnings = [each for each in findings if each.level == "warning" and each.key not in renamed]
    notes += [f"{each.key}: {each.text}" for each in warnings if each.key]  # without one: the file has comments
    notes += [*lost(reading, _OWN), *_without_effect(reading)]
    micro_batch = description.value("batch.micro_batch")
    setup = setup_for(description, device, own=("precision.buffers",))
    return Configuration(reading.values, description, setup, micro_batch, tuple(dict.fromkeys(notes)))


def _loaded(config: str | os.PathLike[str] | Mapping[str, Any]) -> Loaded:
    if isinstance(config, Mapping):
        return Loaded(Path("the config dict"), copy.deepcopy(dict(config)), "", "json")
    if not isinstance(config, str | os.PathLike):
        raise BadInput(f"config is a {type(config).__name__}; pass the path of a JSON file, or a dict.")
    return load(Path(config))


def _open(reading: Reading) -> Iterator[str]:
    """Keys that say "auto" and stay open: only Hugging Face's libraries fill them in. Some sections drop the word."""
    settings = [setting for _, setting in reading.description.items() if setting.origin == "auto"]
    keys = [setting.key for setting in settings if setting.value is None]
    autos = [verdict.key for verdict in reading.verdicts if verdict.value == AUTO and verdict.kind != "refused"]
    keys += [key for key in autos if key not in LITERAL and key.rpartition(".")[0] not in STRICT]
    for key in dict.fromkeys(keys):
        yield f"{key} is 'auto', which Hugging Face's libraries fill in, and DeepSpeed does not: put a value"


def _without_activations(description: Description) -> tuple[Description, list[str]]:
    if not description.value(_OFFLOADED_ACTIVATIONS):
        return description, []
    key = description[_OFFLOADED_ACTIVATIONS].key
    changed = description.replace({_OFFLOADED_ACTIVATIONS: Setting(False, "derived", key)})
    return changed, [f"{key}: it is for deepspeed.checkpointing, which this integration has not"]


def _without_effect(reading: Reading) -> Iterator[str]:
    """Keys that say something else than their defaults, and change no result."""
    harmless = [key for key, extra in extras_by_key(reading.description).items() if extra.loss == "harmless"]
    others = [key for key in harmless if key not in _OWN and not key.startswith(_BUILT_HERE)]
    if asking := [key for key in others if _asks(key, reading.values.get(key))]:
        yield f"without effect here, and on the results: {', '.join(asking)}"


def _asks(key: str, value: object) -> bool:
    """Whether a key says something else than its default."""
    row = TABLE.get(key)
    return value not in (None, {}) and (row is None or value != row.neutral)
