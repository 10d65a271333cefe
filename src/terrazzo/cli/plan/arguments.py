"""The arguments of `terrazzo plan`, read once: text that is to be a number is one, and every value has its type."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from terrazzo.cli.plan.options import OPTION_ROWS
from terrazzo.cli.plan.values import read_numbers

if TYPE_CHECKING:
    from terrazzo.config import Config

__all__ = ["FromConfig", "FromCount", "FromModel", "PlanArguments", "PlanSource"]


@dataclass(frozen=True)
class FromConfig:
    """A configuration of `terrazzo train`, with the settings that replace some of the file's."""

    label: ClassVar[str] = "CONFIG"
    path: Path
    overrides: list[str]

    @cached_property
    def config(self) -> Config:
        """Read once. Raises: `BadInput` for what `terrazzo train` would refuse too."""
        from terrazzo.config import load_config  # the schema, which --help can do without

        return load_config(self.path, self.overrides)


@dataclass(frozen=True)
class FromModel:
    """A model by its name or path, which the options plan."""

    label: ClassVar[str] = "--model"
    name: str


@dataclass(frozen=True)
class FromCount:
    """A bare number of parameters, as it was written."""

    label: ClassVar[str] = "--params"
    text: str


PlanSource = FromConfig | FromModel | FromCount
"""What describes the model. `label` is what the command line calls it, and `PlanOption.beside`."""


@dataclass(frozen=True)
class PlanArguments:
    """What `terrazzo plan` was called with. A field has the name of its option; None where that was left out.

    Attributes:
        overrides: settings that replace those of the file `config`.
        request_fields: of the planner's `Request`: the value of every option that is one, in the field's unit.
        written: names of the arguments that were written, and not left at their defaults.
    """

    config: Path | None
    overrides: list[str]
    model: str | None
    params: str | None
    gpu: str | None
    gpus: str | None
    min_gpus: bool
    strategy: str | None
    offload: str | None
    precision: str | None
    no_sequence_parallel: bool
    framework: str
    json: bool
    explain: str | None
    emit: Path | None
    picture: Path | None
    html: Path | None
    calibrate: bool
    request_fields: Mapping[str, Any]
    written: frozenset[str]

    @classmethod
    def read(cls, values: Mapping[str, Any], written: Collection[str]) -> PlanArguments:
        """From what typer has of each argument, by name.

        Raises: `BadInput` for text that is no number where one is expected, before any work.
        """
        values = read_numbers(values) | {"overrides": values["overrides"] or []}
        request_fields = {row.field: row.in_unit(values[row.argument]) for row in OPTION_ROWS if row.field}
        own = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**own, request_fields=request_fields, written=frozenset(written))
