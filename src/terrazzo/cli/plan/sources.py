"""What describes the model for `terrazzo plan`: a configuration, a name, or a bare number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from terrazzo.config import Config

__all__ = ["FromConfig", "FromCount", "FromModel", "PlanSource"]


@dataclass(frozen=True)
class FromConfig:
    """A configuration of `terrazzo train`, with settings that override the file's."""

    label: ClassVar[str] = "CONFIG"
    path: Path
    overrides: list[str]

    @cached_property
    def config(self) -> Config:
        """The configuration, read once; raises `BadInput` for what `terrazzo train` would refuse too."""
        from terrazzo.config import load_config  # the schema, which --help can do without

        return load_config(self.path, self.overrides)


@dataclass(frozen=True)
class FromModel:
    """A model by its name or path."""

    label: ClassVar[str] = "--model"
    name: str


@dataclass(frozen=True)
class FromCount:
    """A bare number of parameters, as text."""

    label: ClassVar[str] = "--params"
    text: str


PlanSource = FromConfig | FromModel | FromCount
"""What describes the model. `label` is its name on the command line and in `PlanOption.beside`."""
