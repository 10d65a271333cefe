"""What every section of the configuration is."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

__all__ = ["Named", "Section"]


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, validate_default=True)


class Named(Section):
    """A section that may be given as just its name."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str | int) else value
