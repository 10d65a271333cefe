"""The base class of every section of the configuration: no unknown keys, and one spelling of each value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

__all__ = ["KEYS_ALONE", "KeyDisagreement", "KeysDisagree", "Named", "Section", "is_name", "whole_number"]

KEYS_ALONE = {"agree": False}
"""The context of a validation that looks at each key by itself."""


class KeyDisagreement(NamedTuple):
    """Keys that are right by themselves, and cannot be together.

    Attributes:
        key: one of them, dotted, below the section that says so.
        why: behind the key in a sentence, with the edit that mends it.
    """

    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.key} {self.why}".strip()


class KeysDisagree(ValueError):
    """Keys of a section that cannot be together.

    Attributes:
        told: each reason.
    """

    def __init__(self, told: Sequence[KeyDisagreement]) -> None:
        super().__init__("; ".join(map(str, told)))
        self.told = tuple(told)


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys, no NaN or infinity, and one spelling of each value."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Switches are true or false, and numbers are numbers: pydantic alone takes `true` for 1 and 'off' for false.

        A whole number may be written `5e3`, which every format reads as 5000.0, as long as that is exact.
        """
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        kinds = {annotation, *get_args(annotation)}
        if bool in kinds and not isinstance(value, bool):
            raise PydanticKnownError("bool_type")
        if int in kinds and float not in kinds:
            check_exact(value)
        if kinds & {int, float} and isinstance(value, bool if str in kinds else bool | str):
            raise PydanticKnownError("int_type" if int in kinds else "float_type")
        return value

    @model_validator(mode="after")
    def _together(self, info: ValidationInfo) -> Self:
        told = list(self._disagreements()) if (info.context or {}).get("agree", True) else []
        if told:
            raise KeysDisagree(told)
        return self

    def disagreements(self) -> Iterator[tuple[str, KeyDisagreement]]:
        """What cannot be together, here and in the sections within: behind the dotted key of the section that says so,
        empty for this one.
        """
        for name, value in self:
            if isinstance(value, Section):
                yield from ((f"{name}.{inner}".strip("."), told) for inner, told in value.disagreements())
        yield from (("", told) for told in self._disagreements())

    def changed_keys(self, *keys: str) -> list[str]:
        """Those of `keys`, by default of all keys here, whose value is not the default."""
        usual = type(self).model_fields
        return [name for name, value in self if name in (keys or usual) and value != usual[name].default]

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        """What keys of this section cannot be together; nothing where all can."""
        yield from ()


def check_exact(value: Any) -> None:
    """Raises `PydanticKnownError` for a float that other whole numbers are rounded to, too."""
    if isinstance(value, float) and abs(value) >= 2**53:
        raise PydanticKnownError("int_type")


def whole_number(value: Any) -> int:
    """A whole number above 0, for a key that may also be a word. Raises: `PydanticKnownError` for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value // 1:
        raise PydanticKnownError("int_type")
    check_exact(value)
    if value <= 0:
        raise PydanticKnownError("greater_than", {"gt": 0})
    return int(value)


class Named(Section):
    """A section that may be given as just its name."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if is_name(value) else value


def is_name(value: Any) -> bool:
    """Whether a value in place of a section is its name; some are numbers, such as precision's 32."""
    return isinstance(value, str | int) and not isinstance(value, bool)
