"""What a few measured steps say of one device and software version, kept beside the user's other caches.

A record replaces guesses by measurements: the rate of the matrix products, the bandwidth of the collectives, what a
step costs whatever its size, and the memory that no tensor of the plan accounts for. It holds for the device and its
figures, the software, the number of ranks and the matrix format that it was measured with, and is ignored elsewhere.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.files import cache_folder, replace_file
from terrazzo.planner.figures import MemoryFigures
from terrazzo.planner.machine.devices import Device
from terrazzo.planner.setup.setup import Setup

__all__ = [
    "Calibration",
    "MeasuredRun",
    "Software",
    "calibration_folder",
    "figures_of",
    "find_calibration",
    "load_calibration",
    "measured_memory",
    "processor",
    "run_of",
]

FORMAT_VERSION: Literal[2] = 2


class Software(BaseModel):
    """Versions on which a measurement depends. `driver` is CUDA's, or empty on a CPU."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    terrazzo: str
    torch: str
    driver: str = ""

    @classmethod
    def here(cls) -> Software:
        """The versions in this process."""
        try:
            own = version("terrazzo")
        except PackageNotFoundError:
            own = "source"
        return cls(terrazzo=own, torch=torch.__version__, driver=torch.version.cuda or "")


class MeasuredRun(BaseModel):
    """What was run: a measurement holds in full for the same model, run in the same way.

    Attributes:
        model: its name; `parameters`, `trainable`: how many.
        choices: everything else that a setup says, but for `OF_ANY_RUN`, by its fields.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    parameters: int
    trainable: int
    layers: int
    hidden: int
    choices: dict[str, str]


OF_ANY_RUN = ("model", "adapters", "freeze", "cluster", "sequence", "micro_batch", "micro_batches", "empty_rows")
"""Fields of a setup by which a measurement is scaled or found. A model, and what of it is trained, its sizes tell."""


def run_of(setup: Setup) -> MeasuredRun:
    """What a setup runs, whatever its batch and sequence length."""
    model, precision = setup.model, replace(setup.precision, loss_scaling=None)  # which follows the batch
    offload = replace(setup.offload, path=None)  # wherever its files are
    plan = " | ".join(f"{state} {place}" for state, place in setup.plan.places().items())  # by whatever name
    optimizer = f"{setup.optimizer.torch_class or setup.optimizer.name}, {setup.optimizer.moments} moments"
    resolved = {"precision": precision, "plan": plan, "offload": offload, "framework": setup.framework.name}
    resolved |= {"optimizer": optimizer, "optimizer_kernel": setup.update_kernel}
    choices = {field.name: getattr(setup, field.name) for field in fields(Setup) if field.name not in OF_ANY_RUN}
    return MeasuredRun(
        model=model.name,
        parameters=model.numel,
        trainable=model.trainable_numel,
        layers=model.layers,
        hidden=model.hidden,
        choices={name: str(value) for name, value in (choices | resolved).items()},
    )


OF_ANY_DEVICE = ("name", "kind", "memory_bytes", "per_node", "scaleup_domain", "source", "notes")
"""Fields of a device that no time of computing is computed from, or that only say which hosts and links it is in."""


def figures_of(device: Device) -> dict[str, str]:
    """The figures of a device that times are computed from, by name: a pace corrects these alone."""
    return {field.name: str(getattr(device, field.name)) for field in fields(Device) if field.name not in OF_ANY_DEVICE}


class Calibration(BaseModel):
    """One record, per rank. What follows from it for a step is in `terrazzo.planner.timing.measured`.

    Attributes:
        device: name, as `devices.this_machine` gives it; `figures`: its own, as `figures_of` gives them, which `pace`
            corrects. `processor`: what it really is, as `processor` gives it.
        world_size: ranks that were running.
        matmul: format of the matrix products, such as `bf16`.
        run: what was measured; None where that is not known.
        pace: by how much longer computation took than the device's figures say; None where they are not known.
        flops_per_s: FLOPs of forward, backward and recomputation of one rank per second in which it did not wait.
        bandwidth: bytes that a rank sent per second in which it stood waiting for collectives, hidden ones included;
            None where the device waits and not the process (CUDA).
        overhead_s: what a step costs whatever its number of tokens, beside what follows from the device's figures where
            they are known: launching, Python, and where they are not, the optimizer.
        memory_offset_bytes: measured peak (CUDA: allocated by tensors; CPU: resident) minus the predicted one.
        step_s, tokens, flops, traffic_bytes: of the measured step, per rank: the evidence.
        steps: how many were timed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    version: Literal[2] = FORMAT_VERSION
    device: str
    figures: dict[str, str]
    processor: str
    software: Software
    world_size: int = Field(gt=0)
    matmul: str
    run: MeasuredRun | None = None
    pace: float | None = Field(None, gt=0)
    flops_per_s: float = Field(gt=0)
    bandwidth: float | None = Field(None, gt=0)
    overhead_s: float = Field(0.0, ge=0)
    memory_offset_bytes: int = 0
    step_s: float = Field(gt=0)
    tokens: int = Field(gt=0)
    flops: float = Field(gt=0)
    traffic_bytes: int = Field(0, ge=0)
    steps: int = Field(gt=0)

    def measured(self, setup: Setup) -> bool:
        """Whether steps of this very model under this very plan were timed."""
        return self.run == run_of(setup)

    @property
    def file_name(self) -> str:
        """Name of the record's file: the same for every record that replaces this one."""
        return record_name(self.device, self.matmul, self.world_size)

    def save(self, folder: Path | None = None) -> Path:
        """Write the record, whole or not at all; the path. `folder` defaults to `calibration_folder()`."""
        folder = calibration_folder() if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name
        replace_file(path, self.model_dump_json(indent=2) + "\n", sync=False)
        return path


def calibration_folder() -> Path:
    """`terrazzo/calibration` in the user's cache folder."""
    return cache_folder("calibration")


def processor(kind: str) -> str:
    """This machine's GPU as torch names it, or its CPU's model."""
    if kind == "cuda":
        return str(devices.properties().name)
    match = None
    if os.path.exists("/proc/cpuinfo"):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


class FoundRecord(NamedTuple):
    """The record for a setup; or None, with a line that says why one that is there is not used, if there is one."""

    record: Calibration | None
    why_not: str = ""


def find_calibration(setup: Setup, folder: Path | None = None) -> FoundRecord:
    """The record for the setup's device, ranks and matrix format."""
    folder = calibration_folder() if folder is None else folder
    device = setup.cluster.device
    path = folder / record_name(device.name, setup.matmul, setup.mesh.world_size)
    if not path.exists():
        return FoundRecord(None)
    try:
        record = load_calibration(path)
    except BadInput as error:
        return _unused(str(error))
    here = Software.here()
    if record.software != here:
        return _unused(f"{path} was measured with {_shown(record.software)}, this is {_shown(here)}")
    if device.kind == "cpu" and record.processor != processor("cpu"):
        return _unused(f"{path} was measured on {record.processor}, this is {processor('cpu')}")
    if other := [f"{name} {value}" for name, value in figures_of(device).items() if record.figures.get(name) != value]:
        return _unused(f"{path} was measured with other figures of {device.name} than {other[0]}")
    return FoundRecord(record)


def _unused(why: str) -> FoundRecord:
    return FoundRecord(None, f"calibration not used: {why}")


def measured_memory(memory: MemoryFigures, record: Calibration, setup: Setup) -> MemoryFigures:
    """`memory` with what tensors did not account for when `record` was measured.

    On a CPU that is the process, which every run has; on a GPU what one run's estimate was wrong by, and no other's.
    """
    offset: float = record.memory_offset_bytes
    if setup.cluster.device.kind == "cpu":
        offset -= memory.device_bytes - memory.reserved_bytes  # the process, as it was expected
    elif not record.measured(setup):
        return memory
    return replace(
        memory,
        device_bytes=memory.device_bytes + offset,
        upper_bytes=memory.upper_bytes + max(0, offset),
    )


def load_calibration(path: Path) -> Calibration:
    """The record in a file that the user names. Raises: `BadInput` where it is none."""
    try:
        return Calibration.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"The calibration record '{path}' cannot be read: {error}. Run --calibrate again.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(
            f"'{path}' is no calibration record of version {FORMAT_VERSION}: {where or 'the file'}: {first['msg']}. "
            "Remove it and run --calibrate again."
        ) from None


def record_name(device: str, matmul: str, world_size: int) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{slug}.{matmul}.{world_size}.json"


def _shown(software: Software) -> str:
    driver = f", CUDA {software.driver}" if software.driver else ""
    return f"terrazzo {software.terrazzo}, torch {software.torch}{driver}"
