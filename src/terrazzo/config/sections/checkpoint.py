"""The section `checkpoint`: when a run is saved, where, and what a new start does with what is there."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from terrazzo.config.section import Section, whole_number
from terrazzo.files import is_url

__all__ = ["CheckpointConfig"]


class LocalConfig(Section):
    """Further checkpoints in memory, or on a drive, of each host, for a run that is started again there."""

    folder: str | None = Field(
        None,
        description="such as /dev/shm, or a folder on an NVMe drive; $NAME is as each host's environment has it; null: "
        "none are taken",
    )
    every: int = Field(10, gt=0, description="steps between them; there is one at a time")
    partner: Literal["auto", "required", "none"] = Field(
        "auto",
        description="copies of each host's part on another host, so that one may be lost: `auto`: where there are "
        "several, and go on, and say so, where one fails; `required`: refuse one host, and end; `none`: take none",
    )

    @field_validator("folder")
    @classmethod
    def _on_the_machine(cls, folder: str | None) -> str | None:
        if folder is not None and is_url(folder):
            raise ValueError(
                f"'{folder}' is to be on the machine: use /dev/shm or a folder on a drive of its own. checkpoint.folder"
                " may be a URL"
            )
        return folder


class CheckpointConfig(Section):
    """When training state is saved, where, and what a new start does with what is there."""

    folder: str | None = Field(None, description="folder or fsspec URL; null: log.folder/checkpoints")
    every: int | str | None = Field(
        None,
        description="steps between checkpoints; auto: as the cost of one, measured, and mtbf_hours have it; null: at "
        "the end and on SIGTERM",
    )
    mtbf_hours: float = Field(
        50_000.0,
        gt=0,
        description="auto: hours between failures of one rank, in the mean; default: as in Llama 3's training, 419 in "
        "54 days of 16,384 GPUs",
    )
    overhead: float = Field(0.05, gt=0, lt=1, description="auto: largest share of the time that saves hold training up")
    local: LocalConfig = LocalConfig()
    keep_last: int | None = Field(2, gt=0, description="older checkpoints are removed; null: all are kept")
    keep_every: int | None = Field(
        None, gt=0, description="those of steps divisible by this are kept as well; null: none"
    )
    keep_best: int = Field(0, ge=0, description="so many of the lowest validation loss are kept as well")
    background: bool = Field(False, description="train on while a copy of the state is written by another process")
    staging_gib: float | None = Field(None, gt=0, description="background: largest copy per rank, in GiB; null: any")
    resume: Literal["if_exists", "required", "never"] = Field(
        "if_exists",
        description="`if_exists`: continue from the newest, else start; `required`: refuse to start without one; "
        "`never`: start anew",
    )
    overwrite: bool = Field(False, description="with resume 'never': remove checkpoints already in the folder")
    cast: bool = Field(False, description="resume although states are rounded to a narrower dtype")
    allow_changed_data: bool = Field(False, description="resume although the data or their order are others")
    save_format: Literal["terrazzo", "hf"] = Field(
        "terrazzo",
        description="`hf`: at the end also a Hugging Face folder, log.folder/hf; with adapters a PEFT folder",
    )

    @field_validator("every", mode="before")
    @classmethod
    def _as_number_or_auto(cls, value: Any) -> Any:
        if value in (None, "auto"):
            return value
        if isinstance(value, str | bool):
            raise ValueError(f"{value!r} is neither a number of steps nor auto")
        return whole_number(value)
